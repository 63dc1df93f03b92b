"""Every kernel compiles for every GPU generation we claim, without a GPU; on Hopper the fast instructions are there."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("triton")

from moe.kernels.plan import Plan
from tests.moe.kernels.compiling import compile_gemm, compile_group, compile_quantize, compile_sum

ARCHS = (80, 86, 89, 90, 100, 120)
DIRECT = Plan(direct=True, block_m=16, block_n_1=64, block_n_2=64, split_k=2)
GROUPED = Plan(direct=False, block_m=64, block_n_1=128, block_n_2=128, stages_1=3, stages_2=3)
SMALLEST_SHARED_BYTES = 99 * 1024  # sm86, sm89 and sm120; the others have more


@pytest.mark.parametrize("arch", ARCHS)
def test_gemms_compile_for_every_format_within_shared_memory(arch: int) -> None:
    compiled = [
        compile_gemm("mxfp4", DIRECT, arch, is_first=True),
        compile_gemm("mxfp4", GROUPED, arch, is_first=False),
        compile_gemm("bf16", DIRECT, arch, is_first=False),
        compile_gemm("fp8_block", GROUPED, arch, is_first=True),
        compile_gemm("nvfp4", DIRECT, arch, is_first=True),
    ]
    assert all(kernel.metadata.shared <= SMALLEST_SHARED_BYTES for kernel in compiled)


@pytest.mark.parametrize("arch", ARCHS)
def test_grouping_and_summing_compile(arch: int) -> None:
    assert "cubin" in compile_group(GROUPED, arch).asm
    assert "cubin" in compile_sum(DIRECT, arch).asm


@pytest.mark.parametrize("plan", [DIRECT, GROUPED], ids=["direct", "grouped"])
def test_hopper_code_streams_whole_vectors_and_multiplies_from_registers(plan: Plan) -> None:
    ptx = compile_gemm("mxfp4", plan, 90, is_first=True).asm["ptx"]
    assert "cp.async.cg.shared.global [ %" in ptx.replace("+", " +")
    assert ", 0x10, " in ptx  # 16-byte copies
    assert "wgmma.mma_async.sync.aligned" in ptx
    assert "ldmatrix.sync.aligned.m8n8.x4" in ptx  # packed words go to the matrix unit's own register layout
    assert "local" not in ptx.split(".entry", 1)[1]  # nothing spilled or indexed at run time


@pytest.mark.parametrize("arch", [89, 90, 100, 120])
def test_fp8_activations_multiply_in_fp8(arch: int) -> None:
    plan = replace(GROUPED, fp8_activations=True)
    kernel = compile_gemm("fp8_block", plan, arch, is_first=True)
    assert kernel.metadata.shared <= SMALLEST_SHARED_BYTES
    assert ("kind::f8f6f4" if arch == 100 else ".e4m3.e4m3") in kernel.asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2" in compile_quantize(arch).asm["ptx"]


def test_early_start_compiles_on_hopper() -> None:
    plan = Plan(direct=True, block_m=8, block_n_1=64, block_n_2=64, pdl=True, prefetch=True)
    ptx = compile_gemm("mxfp4", plan, 90, is_first=False).asm["ptx"]
    assert "griddepcontrol.wait" in ptx
    assert "cp.async.bulk.prefetch.L2.global" in ptx


def test_importing_the_backend_does_not_import_triton() -> None:
    program = "import sys, moe.registry as r; r.load_backend('triton'); sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": os.getcwd()}, check=True)
