"""Every kernel compiles for every GPU generation we claim, without a GPU; on Hopper the fast instructions are there."""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import triton

from moe.backends.triton.plans import LayerShape, plans_for
from moe.kernels.plan import Plan
from tests.moe.kernels.compiling import (
    ARCHS,
    FORMATS,
    compile_gemm,
    compile_group,
    compile_quantize,
    compile_sum,
    of_hopper_and_others,
    reached_before,
    rest,
)
from tests.tables import rows

DIRECT = Plan(is_direct=True, block_m=16, block_n_1=64, block_n_2=64, split_k=2)
GROUPED = Plan(is_direct=False, block_m=64, block_n_1=128, block_n_2=128, num_stages_1=3, num_stages_2=3)
SMALLEST_SHARED_BYTES = 99 * 1024  # sm86, sm89 and sm120; the others have more


@pytest.mark.parametrize(
    ("arch", "format_name"),
    [
        *((90, format_name) for format_name in FORMATS),
        *(rest(*pair) for pair in itertools.product((80, 100), FORMATS)),
        *(rest(arch, "mxfp4") for arch in (86, 89, 120)),
    ],
)
def test_both_gemms_of_every_format_compile_within_shared_memory(arch: int, format_name: str) -> None:
    for plan, is_first in itertools.product([DIRECT, GROUPED], [True, False]):
        kernel = compile_gemm(format_name, plan, arch, is_first=is_first)
        assert "cubin" in kernel.asm
        assert kernel.metadata.shared <= SMALLEST_SHARED_BYTES


@rows("arch", *(arch for arch in ARCHS if arch != 90))
@rows("format_name", *FORMATS)
@rows("num_experts, top_k", (32, 4), (256, 8), (4, 2))
def test_plans_of_unmeasured_gpus_are_no_larger_than_the_compiled_ones(
    arch: int, format_name: str, num_experts: int, top_k: int
) -> None:
    shape = LayerShape(
        arch=f"sm{arch}", format_name=format_name, num_experts=num_experts, top_k=top_k, hidden_size=2880,
        intermediate_size=2880,
    )  # fmt: skip
    for _, plan in plans_for(shape).steps:
        largest = DIRECT if plan.is_direct else GROUPED
        assert plan.block_m <= largest.block_m
        assert replace(plan, block_m=largest.block_m) == largest


@pytest.mark.kernels
@rows("arch", 80, 90)
def test_the_variants_of_plans_compile(arch: int) -> None:
    is_direct, grouped = replace(DIRECT, by_expert=True, split_k=1), replace(GROUPED, num_tile_heights=3)
    for plan in (is_direct, replace(is_direct, block_m=32), grouped):
        kernel = compile_gemm("mxfp4", plan, arch, is_first=True, one_tile=False, has_tail=False, top_k=6)
        assert kernel.metadata.shared <= SMALLEST_SHARED_BYTES


@pytest.mark.kernels
@rows("format_name", "mxfp4", "fp8_block")
def test_one_step_one_block_and_wide_offsets_compile(format_name: str) -> None:
    """Triton makes a constant of every size that is one."""
    one = {"is_first": True, "num_steps": 1, "num_blocks": 1}
    for plan in (replace(DIRECT, pdl=True, split_k=1), GROUPED):
        for others in (one | {"has_tail": False, "SHORT_K": True}, one, {"is_first": False, "WIDE": True, "top_k": 3}):
            assert "cubin" in compile_gemm(format_name, plan, 90, **others).asm


@of_hopper_and_others
def test_grouping_summing_and_quantizing_compile(arch: int) -> None:
    kernels = [compile_group(GROUPED, arch), *(compile_sum(plan, arch) for plan in (DIRECT, GROUPED))]
    kernels += [compile_quantize(arch, by_slot=by_slot) for by_slot in (True, False)]
    assert all("cubin" in kernel.asm for kernel in kernels)


@rows("plan", DIRECT, GROUPED)
def test_hopper_code_streams_whole_vectors_and_multiplies_from_registers(plan: Plan) -> None:
    ptx = compile_gemm("mxfp4", plan, 90, is_first=True).asm["ptx"]
    assert "cp.async.cg.shared.global [ %" in ptx.replace("+", " +")
    assert ", 0x10, " in ptx  # 16-byte copies
    assert "wgmma.mma_async.sync.aligned" in ptx
    assert "ldmatrix.sync.aligned.m8n8.x4" in ptx  # packed words go to the matrix unit's own register layout
    assert "local" not in ptx.split(".entry", 1)[1]  # nothing spilled or indexed at run time


@pytest.mark.parametrize("arch", [90, rest(80)])
def test_a_tail_is_on_its_way_before_the_loop_of_low_tiles_only(arch: int) -> None:
    """Loops copy to shared memory; loads of whole vectors into registers are the tail's. Tall tiles have no masks."""
    plans = [(replace(DIRECT, block_m=block_m), block_m <= 16) for block_m in (16, 32)]
    plans += [(replace(GROUPED, block_m=block_m), False) for block_m in (64, 128)]
    for plan, is_early in plans:
        ptx = compile_gemm("mxfp4", plan, arch, is_first=True).asm["ptx"]
        before, products = re.split(r"mma[._]", ptx, maxsplit=1)
        assert ("ld.global.v4" in before.split("cp.async", 1)[0]) == is_early
        assert ("ld.global.v4" in products) == (not is_early)
        assert bool(re.search(r"^\s*ld\.global\.v4", ptx, re.MULTILINE)) == (plan.block_m >= 128)


@pytest.fixture
def ptxas_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Compiles for Hopper as `compile_gemm` does, and returns what ptxas says."""
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    monkeypatch.setattr(triton.knobs.nvidia, "dump_ptxas_log", True)

    def log(format_name: str, plan: Plan, *, is_first: bool) -> str:
        compile_gemm(format_name, plan, 90, is_first=is_first)
        return capsys.readouterr().out

    return log


@pytest.mark.kernels
@rows("format_name", "mxfp4", "nvfp4")
@rows("is_first", True, False)
def test_hopper_keeps_several_products_in_flight(
    ptxas_log: Callable[..., str], format_name: str, is_first: bool
) -> None:
    """ptxas says where it lets every matrix instruction wait for the one before; that cost a tenth of the speed."""
    log = ptxas_log(format_name, replace(GROUPED, block_m=128), is_first=is_first)
    assert "registers" in log
    assert "serialized" not in log


@pytest.mark.kernels
def test_sums_of_fp8_products_stay_in_registers(ptxas_log: Callable[..., str]) -> None:
    """Without the promise that the loop runs, 692 bytes a thread went through memory in every step."""
    log = ptxas_log("fp8_block", replace(GROUPED, block_m=128, fp8_activations=True), is_first=True)
    (spilled,) = re.findall(r"(\d+) bytes spill stores", log)
    assert int(spilled) < 128


@pytest.mark.parametrize("arch", [90, rest(89), rest(100), rest(120)])
def test_fp8_activations_multiply_in_fp8(arch: int) -> None:
    plan = replace(GROUPED, fp8_activations=True)
    for is_first in (True, False):
        kernel = compile_gemm("fp8_block", plan, arch, is_first=is_first)
        assert kernel.metadata.shared <= SMALLEST_SHARED_BYTES
        assert ("kind::f8f6f4" if arch == 100 else ".e4m3.e4m3") in kernel.asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2" in compile_quantize(arch).asm["ptx"]


@pytest.mark.parametrize("format_name", ["mxfp4", rest("fp8_block")])
@rows("one_tile", True, False)
def test_direct_kernels_that_start_early_wait_in_time_on_hopper(format_name: str, one_tile: bool) -> None:
    plan = Plan(is_direct=True, block_m=16, block_n_1=64, block_n_2=64, pdl=True)
    for is_first in (True, False):
        ptx = compile_gemm(format_name, plan, 90, is_first=is_first, one_tile=one_tile).asm["ptx"]
        before = reached_before(ptx, "griddepcontrol.wait")
        assert "griddepcontrol.wait" in ptx
        assert "cp.async.cg" in ptx
        assert "cp.async.cg" not in before, "no activations are read before the wait"
        assert "st.global" not in before
        assert ("ld.global" in before) == (not is_first), "what comes before a layer may still be writing the ids"
        assert not is_first or "griddepcontrol.launch_dependents" not in before, "the next kernel reads ids at once"
        assert "griddepcontrol.launch_dependents" in ptx
        assert "cp.async.bulk.prefetch.L2.global" in ptx
        assert ("cp.async.bulk.prefetch.L2.global" in before) == (not is_first)
        assert re.search(r"@%?p\d* cp\.async\.bulk\.prefetch", ptx), "one thread asks for all"


@pytest.mark.parametrize("arch", [90, rest(80), rest(100)])
@pytest.mark.parametrize("format_name", ["fp8_block", "mxfp4", rest("bf16"), rest("nvfp4")])
def test_the_last_program_of_a_tile_adds_up_the_parts_of_the_first_matrix(arch: int, format_name: str) -> None:
    plan = Plan(is_direct=True, block_m=8, block_n_1=64, block_n_2=64, split_k=2, split_k_1=4, pdl=arch == 90)
    tall = replace(plan, block_n_1=128, by_expert=True)
    for shared, one_tile in ((plan, True), (tall, False)):
        kernel = compile_gemm(format_name, shared, arch, is_first=True, one_tile=one_tile)
        ptx = kernel.asm["ptx"]
        before, after = re.split(r"atom\.", ptx)
        assert before.rindex("bar.sync") > before.rindex("st.global"), "all threads store before one of them arrives"
        assert "ld.global.cg" not in before
        assert "ld.global.cg.v4" in after, "the L1 may hold other numbers"
        assert "local" not in ptx.split(".entry", 1)[1], "nothing spilled or indexed at run time"
        assert kernel.metadata.shared <= SMALLEST_SHARED_BYTES
        if plan.pdl:
            assert not re.search(r"ld\.global|st\.global|atom\.", reached_before(ptx, "griddepcontrol.wait"))
    for alone, is_first in ((replace(plan, split_k_1=1), True), (plan, False)):
        ptx = compile_gemm(format_name, alone, arch, is_first=is_first).asm["ptx"]
        assert not re.search(r"atom\.|ld\.global\.cg", ptx)


def test_kernels_that_start_early_wait_before_they_read_or_write() -> None:
    plan = replace(GROUPED, pdl=True)
    kernels = [compile_gemm("mxfp4", plan, 90, is_first=is_first) for is_first in (True, False)]
    kernels += [compile_group(plan, 90), compile_sum(plan, 90), compile_quantize(90, use_pdl=True)]
    for kernel in kernels:
        ptx = kernel.asm["ptx"]
        assert "griddepcontrol.wait" in ptx, kernel.name
        before = reached_before(ptx, "griddepcontrol.wait")
        assert not re.search(r"ld\.global|st\.global|cp\.async", before), kernel.name
        assert re.search(r"ld\.global|cp\.async", ptx)


def test_importing_the_backend_does_not_import_triton() -> None:
    program = "import sys, moe.registry as r; r.load_backend('triton'); sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": os.getcwd()}, check=True)
