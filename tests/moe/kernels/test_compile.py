"""Every kernel compiles for every GPU generation we claim, without a GPU; on Hopper the fast instructions are there."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("triton")

from moe.backends.triton_plans import LayerShape, plans_for
from moe.kernels.plan import Plan
from tests.moe.kernels.compiling import FORMATS, compile_gemm, compile_group, compile_quantize, compile_sum

ARCHS = (80, 86, 89, 90, 100, 120)
DIRECT = Plan(direct=True, block_m=16, block_n_1=64, block_n_2=64, split_k=2)
GROUPED = Plan(direct=False, block_m=64, block_n_1=128, block_n_2=128, stages_1=3, stages_2=3)
SMALLEST_SHARED_BYTES = 99 * 1024  # sm86, sm89 and sm120; the others have more


@pytest.mark.parametrize("plan", [DIRECT, GROUPED], ids=["direct", "grouped"])
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("arch", ARCHS)
def test_both_gemms_of_every_format_compile_within_shared_memory(arch: int, format_name: str, plan: Plan) -> None:
    for is_first in (True, False):
        kernel = compile_gemm(format_name, plan, arch, is_first=is_first)
        assert "cubin" in kernel.asm
        assert kernel.metadata.shared <= SMALLEST_SHARED_BYTES


@pytest.mark.parametrize(("num_experts", "top_k"), [(32, 4), (256, 8), (4, 2)])
@pytest.mark.parametrize("format_name", FORMATS)
def test_plans_of_unmeasured_gpus_are_no_larger_than_the_compiled_ones(
    format_name: str, num_experts: int, top_k: int
) -> None:
    for arch in set(ARCHS) - {90}:
        shape = LayerShape(
            arch=f"sm{arch}", format_name=format_name, num_experts=num_experts, top_k=top_k, hidden_size=2880,
            intermediate_size=2880,
        )  # fmt: skip
        for _, plan in plans_for(shape).steps:
            largest = DIRECT if plan.direct else GROUPED
            assert plan.block_m <= largest.block_m
            assert replace(plan, block_m=largest.block_m) == largest


@pytest.mark.parametrize("arch", [80, 90])
def test_the_variants_of_plans_compile(arch: int) -> None:
    for plan in (replace(DIRECT, by_expert=True, split_k=1), replace(GROUPED, heights=3)):
        assert "cubin" in compile_gemm("mxfp4", plan, arch, is_first=True, one_tile=False).asm


@pytest.mark.parametrize("arch", ARCHS)
def test_grouping_summing_and_quantizing_compile(arch: int) -> None:
    assert "cubin" in compile_group(GROUPED, arch).asm
    for plan in (DIRECT, GROUPED):
        assert "cubin" in compile_sum(plan, arch).asm
    for by_slot in (True, False):
        assert "cubin" in compile_quantize(arch, by_slot=by_slot).asm


@pytest.mark.parametrize("plan", [DIRECT, GROUPED], ids=["direct", "grouped"])
def test_hopper_code_streams_whole_vectors_and_multiplies_from_registers(plan: Plan) -> None:
    ptx = compile_gemm("mxfp4", plan, 90, is_first=True).asm["ptx"]
    assert "cp.async.cg.shared.global [ %" in ptx.replace("+", " +")
    assert ", 0x10, " in ptx  # 16-byte copies
    assert "wgmma.mma_async.sync.aligned" in ptx
    assert "ldmatrix.sync.aligned.m8n8.x4" in ptx  # packed words go to the matrix unit's own register layout
    assert "local" not in ptx.split(".entry", 1)[1]  # nothing spilled or indexed at run time


@pytest.mark.parametrize("format_name", ["mxfp4", "nvfp4"])
def test_hopper_keeps_several_products_in_flight(
    format_name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ptxas says where it lets every matrix instruction wait for the one before; that cost a tenth of the speed."""
    import triton

    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    monkeypatch.setattr(triton.knobs.nvidia, "dump_ptxas_log", True)
    for is_first in (True, False):
        compile_gemm(format_name, replace(GROUPED, block_m=128), 90, is_first=is_first)
        log = capsys.readouterr().out
        assert "registers" in log
        assert "serialized" not in log


def test_sums_of_fp8_products_stay_in_registers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the promise that the loop runs, 692 bytes a thread went through memory in every step."""
    import triton

    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    monkeypatch.setattr(triton.knobs.nvidia, "dump_ptxas_log", True)
    compile_gemm("fp8_block", replace(GROUPED, block_m=128, fp8_activations=True), 90, is_first=True)
    (spilled,) = re.findall(r"(\d+) bytes spill stores", capsys.readouterr().out)
    assert int(spilled) < 128


@pytest.mark.parametrize("arch", [89, 90, 100, 120])
def test_fp8_activations_multiply_in_fp8(arch: int) -> None:
    plan = replace(GROUPED, fp8_activations=True)
    for is_first in (True, False):
        kernel = compile_gemm("fp8_block", plan, arch, is_first=is_first)
        assert kernel.metadata.shared <= SMALLEST_SHARED_BYTES
        assert ("kind::f8f6f4" if arch == 100 else ".e4m3.e4m3") in kernel.asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2" in compile_quantize(arch).asm["ptx"]


def test_early_start_compiles_on_hopper() -> None:
    plan = Plan(direct=True, block_m=8, block_n_1=64, block_n_2=64, pdl=True)
    for is_first in (True, False):
        ptx = compile_gemm("mxfp4", plan, 90, is_first=is_first).asm["ptx"]
        before, waits, after = ptx.rpartition("griddepcontrol.wait")  # programs without slots may have one of their own
        assert waits
        assert "cp.async.cg" not in before, "no activations are read before the wait"
        assert "cp.async.cg" in after
        assert ("ld.global" in before) == (not is_first), "what comes before a layer may still be writing the ids"
        assert "cp.async.bulk.prefetch.L2.global" in (after if is_first else before)


def test_kernels_that_start_early_wait_before_they_read_or_write() -> None:
    plan = replace(GROUPED, pdl=True)
    kernels = [compile_gemm("mxfp4", plan, 90, is_first=is_first) for is_first in (True, False)]
    kernels += [compile_group(plan, 90), compile_sum(plan, 90), compile_quantize(90, use_pdl=True)]
    for kernel in kernels:
        before, waits, after = kernel.asm["ptx"].partition("griddepcontrol.wait")
        assert waits, kernel.name
        assert not re.search(r"ld\.global|st\.global|cp\.async", before), kernel.name
        assert re.search(r"ld\.global|cp\.async", after)


def test_importing_the_backend_does_not_import_triton() -> None:
    program = "import sys, moe.registry as r; r.load_backend('triton'); sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": os.getcwd()}, check=True)
