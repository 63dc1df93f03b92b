"""Which failures to start are wrong settings or model files, so that a supervisor need not try again."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import EngineConfigError, MachineError
from engine.load import load_engine
from engine.start_errors import is_user_error, is_wrong_setting
from loaders.errors import CheckpointError
from model.errors import ModelSettingsError, UnsupportedModelError
from moe import SelfCheckError, UnsupportedPathError, WeightFormatError
from tests.tables import rows

ASSETS = Path(__file__).parents[2] / "assets" / "tiny-gpt-oss"


def caused(error, cause):
    error.__cause__ = cause
    return error


@rows(
    "error, is_users, is_setting",
    (EngineConfigError("tp is 3"), True, True),
    (ModelSettingsError("tp is 3"), True, True),
    (UnsupportedModelError("head_dim is 3"), True, True),
    (UnsupportedPathError("no backend can run this"), True, True),
    (CheckpointError("a tensor is missing"), True, True),
    (WeightFormatError("the weights of expert 3 give NaN"), True, True),
    (MachineError("no GPU is here"), True, False),
    (SelfCheckError("layer 3 differs"), True, False),
    (OSError(5, "Input/output error"), True, False),
    (caused(CheckpointError("it cannot be read"), OSError(5, "Input/output error")), True, False),
    (caused(CheckpointError("it cannot be read"), FileNotFoundError(2, "No such file")), True, True),
    (ValueError("a bug"), False, False),
    (RuntimeError("CUDA error"), False, False),
)
def test_what_must_be_changed_before_another_start(error, is_users, is_setting):
    assert (is_user_error(error), is_wrong_setting(error)) == (is_users, is_setting)


@rows(
    "fields",
    {"tensor_parallel_size": 3},
    {"data_parallel_size": 2},
    {"moe_backend": "aiter"},
    {"moe_backend": "triton"},
    {"moe_backend": "flashinfer_cutedsl"},
    {"moe_a2a_backend": "deepep"},
    {"attention_backend": "flashinfer"},
    {"max_model_len": 100_000},
    {"num_pages": 100_000_000},
)
def test_settings_that_no_start_accepts(fields):
    """All of them ended with the exit status of an engine that died, and systemd started them again."""
    with pytest.raises(ValueError, match=" ") as caught:
        load_engine(EngineConfig(model=ASSETS, device="cpu", **fields), None)
    assert is_wrong_setting(caught.value), repr(caught.value)


def test_a_damaged_checkpoint(tmp_path):
    folder = shutil.copytree(ASSETS, tmp_path / "cut")
    os.truncate(folder / "model.safetensors", 9_000_000)
    with pytest.raises(CheckpointError) as caught:
        load_engine(EngineConfig(model=folder, device="cpu"), None)
    assert is_wrong_setting(caught.value)


def test_a_gpu_that_is_not_here_may_come_later(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(MachineError, match="device is 'cuda'") as caught:
        load_engine(EngineConfig(model=ASSETS, device="cuda"), None)
    assert not is_wrong_setting(caught.value)


def test_a_torch_that_cannot_be_imported_is_told_in_one_line(tmp_path):
    """Asking what kind of error it is imported torch again, and the second error hid the first."""
    (tmp_path / "torch.py").write_text("raise OSError(2, 'libcudart.so.13: cannot open shared object file')")
    code = """
from engine.start_errors import is_user_error, is_wrong_setting
try:
    import torch
except OSError as error:
    print(is_user_error(error), is_wrong_setting(error))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True False\n", "")
