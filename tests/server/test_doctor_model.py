"""The doctor on the model and the flags together: what is at fault, how often headers are read for that, the status."""

import shutil

import pytest

from engine.config import EngineConfig
from loaders.safetensors_file import SafetensorsFile
from server import cli
from server.doctor import service
from server.doctor.finding import Finding, Level
from server.doctor.packages import Package
from tests.server.conftest import ASSETS
from tests.tables import rows

TORCH = Package(name="torch", version="2", facts={})
OK, PROBLEM = Level.OK, Level.PROBLEM
WARNING = Finding(topic="NCCL", level=Level.WARNING, text="NCCL is old")
OF_MACHINE = Finding(topic="GPUs", level=PROBLEM, text="none is here")
OF_FLAGS = Finding(topic="flags", level=PROBLEM, text="tensor_parallel_size is 3", is_setting=True)


@pytest.fixture
def opened(monkeypatch):
    """Files whose headers were read."""
    paths = []
    read = SafetensorsFile.__init__
    monkeypatch.setattr(SafetensorsFile, "__init__", lambda self, path: (paths.append(path.name), read(self, path))[1])
    return paths


def shortened(folder):
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)


@rows(
    "damage, settings, levels, num_read",
    (lambda _folder: None, {}, {"model": OK, "flags": OK}, 1),
    (lambda _folder: None, {"max_model_len": 5000}, {"model": OK, "flags": PROBLEM}, 2),
    (lambda _folder: None, {"attention_backend": "flashinfer"}, {"model": OK, "flags": PROBLEM}, 2),
    (lambda _folder: None, {"attention_backend": "triton"}, {"model": OK, "flags": PROBLEM}, 2),
    (lambda _folder: None, {"enable_single_batch_overlap": True}, {"model": OK, "flags": PROBLEM}, 2),
    (lambda _folder: None, {"num_pages": 100_000_000}, {"model": OK, "flags": PROBLEM}, 2),
    (lambda _folder: None, {"load_format": "dummy"}, {"model": OK, "flags": OK}, 0),
    (lambda folder: (folder / "tokenizer.json").unlink(), {}, {"model": PROBLEM}, 1),
    (lambda folder: (folder / "config.json").unlink(), {}, {"model": PROBLEM}, 0),
    (lambda folder: (shutil.rmtree(folder), folder.touch()), {}, {"model": PROBLEM}, 0),
    (shortened, {}, {"model": PROBLEM}, 2),
    (shortened, {"max_model_len": 5000}, {"model": PROBLEM}, 2),
)
def test_headers_are_read_again_only_to_tell_what_is_wrong(tmp_path, opened, damage, settings, levels, num_read):
    folder = shutil.copytree(ASSETS, tmp_path / "model", dirs_exist_ok=True)
    damage(folder)
    opened.clear()
    found = service.model_findings(folder, EngineConfig(model=ASSETS, **settings), TORCH, "cpu")
    assert {each.topic: each.level for each in found} == levels
    assert all(each.is_setting == (each.level is PROBLEM) for each in found)
    assert opened == ["model.safetensors"] * num_read


@rows(
    "findings, status",
    ([WARNING], 0),
    ([WARNING, OF_MACHINE], 1),
    ([WARNING, OF_FLAGS], 2),
    ([OF_MACHINE, OF_FLAGS], 2),
)
def test_the_exit_status_is_that_of_the_service(monkeypatch, capsys, findings, status):
    """`doctor --tensor-parallel-size 3` said `problem flags` and exited with 1."""
    monkeypatch.setattr("server.doctor.command.examine", lambda *_args, **_rest: list(findings))
    assert cli.main(["doctor", "--port", "0"]) == status
    assert findings[-1].text in capsys.readouterr().out
