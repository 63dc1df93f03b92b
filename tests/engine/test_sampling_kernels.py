"""The sampling kernels: results in the interpreter against the torch path, machine code for every GPU, their users."""

import sys

import pytest
import torch

from engine.choose_sampler import make_sampler
from engine.sampler import TorchSampler
from model import fused
from tests.engine.sampling_kernels import KERNELS, compile_sampling
from tests.interpreter import PARTS, RunInterpreted, waits_for_interpreter
from tests.moe.kernels.compiling import of_hopper_and_others

SMALLEST_SHARED_BYTES = 99 * 1024


@waits_for_interpreter
@pytest.mark.parametrize("part", PARTS)
def test_the_kernels_choose_as_the_torch_path_does(part: str, run_interpreted: RunInterpreted) -> None:
    results = run_interpreted("tests.engine.interpreted_sampling", part)
    assert len(results) >= 2
    off = {}
    for group, result in results.items():
        cases = result if isinstance(result, dict) else {"": result}
        off |= {f"{group}: {case}": value for case, value in cases.items() if not value < 1e-5}
    assert off == {}


@of_hopper_and_others
def test_the_kernels_compile(arch: int) -> None:
    for name in KERNELS:
        kernel = compile_sampling(name, arch)
        assert "cubin" in kernel.asm
        assert kernel.metadata.shared <= SMALLEST_SHARED_BYTES
        assert "local" not in kernel.asm["ptx"].split(".entry", 1)[1]  # nothing is indexed at run time


@pytest.mark.parametrize("name", ["row_stats", "collect", "penalize_and_mask"])
def test_rows_are_read_in_whole_vectors(name: str) -> None:
    assert compile_sampling(name, 90).asm["ptx"].count("ld.global.v4.b32") >= 4


def test_a_cpu_and_a_machine_without_triton_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens_M = torch.zeros(4, dtype=torch.int64)
    assert isinstance(make_sampler(tokens_M, 97), TorchSampler)

    class OnGpu:
        device = torch.device("cuda")

    made = []
    from engine import gpu_sampler

    monkeypatch.setattr(fused, "_module", fused._module.__wrapped__)  # which remembers what it found
    monkeypatch.setattr(gpu_sampler, "GpuSampler", lambda *arguments: made.append(arguments) or "kernels")
    assert make_sampler(OnGpu(), 201_088) == "kernels"
    assert isinstance(make_sampler(OnGpu(), 2**19 + 1), TorchSampler), "its mass would not fit into 64 bits"
    monkeypatch.setattr(fused, "missing_for_triton", lambda: "gcc")
    assert isinstance(make_sampler(OnGpu(), 97), TorchSampler)
    monkeypatch.setattr(fused, "missing_for_triton", lambda: None)
    monkeypatch.setitem(sys.modules, "engine.gpu_sampler", None)
    assert isinstance(make_sampler(OnGpu(), 97), TorchSampler)
    assert len(made) == 1
