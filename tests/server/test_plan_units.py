"""`plan` and `explain`: sizes in fitting units, limits of the service, cards by name."""

import json
import logging

import pytest
import torch

from engine.plan import GPUS
from engine.units import size_text
from moe.backend import Backend
from moe.device import Device
from server import cli
from tests.engine.test_memory_plan import GPT_OSS_20B


def test_a_size_has_the_largest_unit_of_which_there_is_one():
    assert size_text(0) == "0 bytes"
    assert size_text(1023) == "1023 bytes"
    assert size_text(1024) == "1.0 KiB"
    assert size_text(3 * 2**20 + 2**19) == "3.5 MiB"
    assert size_text(12.877 * 2**30, 3) == "12.877 GiB"
    assert size_text(2**41) == "2048.0 GiB"


def test_no_part_of_a_small_model_is_shown_as_nothing(capsys):
    assert cli.main(["plan", "--gpu", "h100"]) == 0
    shown = capsys.readouterr().out
    assert "weights" in shown
    assert " MiB " in shown
    assert not [line for line in shown.splitlines() if " 0.0" in line]
    assert cli.main(["plan", "--gpu-memory", "0.01"]) == 1
    shown = capsys.readouterr().out
    assert "tiny-gpt-oss on h100: 10.2 MiB, of which 90% may be used" in shown
    assert "of 10.2 MiB it allows 9.2 MiB" in shown


def test_a_cpu_has_no_gpu_memory(capsys):
    assert cli.main(["plan", "--gpu", "cpu", "--gpu-memory", "16"]) == 2
    assert "--gpu-memory: is for GPUs" in capsys.readouterr().err


def test_no_more_requests_are_promised_than_may_run(capsys):
    counts = []
    for most in (4, 1000):
        assert cli.main(["plan", "--gpu", "h200", "--max-num-seqs", str(most), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["max_num_seqs"] == most
        counts.append(list(shown["requests_by_context_length"].values()))
    assert set(counts[0]) == {4}
    assert max(counts[1]) == 1000
    assert cli.main(["plan", "--gpu", "h200", "--max-num-seqs", "4"]) == 0
    assert "requests at the same time, at most 4 (--max-num-seqs)" in capsys.readouterr().out


def test_explain_knows_the_cards_of_plan(capsys):
    for name, gpu in GPUS.items():
        tables = []
        for flag in (name, gpu.arch):
            assert cli.main(["explain", "--gpu", flag, "--format", "mxfp4"]) == 0
            head, _, table = capsys.readouterr().out.partition("\n")
            tables.append(table)
            assert gpu.arch in head
        assert tables[0] == tables[1]
    assert cli.main(["explain", "--gpu", "h1000", "--format", "mxfp4"]) == 2
    error = capsys.readouterr().err
    assert "--gpu h1000 is not known; known: sm80" in error
    assert "h100" in error.partition("known: ")[2]


@pytest.mark.parametrize("is_missing", [True, False])
def test_measuring_a_model_does_not_log_what_building_it_logs_again(tmp_path, monkeypatch, caplog, is_missing):
    """On a GPU the engine first measures, then builds: `auto` chose, and logged, twice."""
    from model.config import ModelSettings
    from model.sizes import measure_model

    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B))
    monkeypatch.setattr("moe.choose.select.probe_device", lambda _device: Device(arch="sm90"))
    monkeypatch.setattr("model.sizes.probe_device", lambda _device: Device(arch="sm90"))
    monkeypatch.setattr(Backend, "is_installed", lambda self: self.package is None or not is_missing)
    monkeypatch.setattr(Backend, "lacks", lambda self: None if self.is_installed() else f"the package {self.package}")
    caplog.set_level(logging.WARNING)
    settings = ModelSettings(device=torch.device("cuda"), load_format="dummy", dtype=torch.bfloat16)
    sizes = measure_model(tmp_path, settings)
    assert [str(path.backend) for path in sizes.experts] == ["torch" if is_missing else "triton"]
    assert not caplog.records
