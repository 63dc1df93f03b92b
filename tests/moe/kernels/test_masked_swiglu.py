"""G69: the activation between DeepGEMM's two GEMMs touches live rows alone: interpreted, and compiled for its GPUs."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from moe.kernels.masked_swiglu import masked_swiglu_kernel
from tests.moe.kernels.compiling import compile_kernel

CASES = [
    "fp32 scales", "fp32 scales, odd rows", "packed exponents", "packed exponents, words not full", "gpt-oss",
    "one run of rows", "nobody", "no row past the count is read",
]  # fmt: skip


@pytest.fixture(scope="module")
def faults() -> dict[str, str]:
    """What is wrong in every case, all from one interpreter process."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    program = os.path.join(os.path.dirname(__file__), "interpreted_swiglu.py")
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, str] = json.loads(done.stdout)
    assert sorted(result) == sorted(CASES)
    return result


@pytest.mark.parametrize("case", CASES)
def test_live_rows_equal_the_reference_and_no_others_are_touched(faults: dict[str, str], case: str) -> None:
    assert faults[case] == ""


@pytest.mark.parametrize("arch", [90, 100])
def test_it_compiles_for_the_gpus_of_deep_gemm(arch: int) -> None:
    """fp32 scales on SM90, packed exponents on SM100; bytes come from the hardware's own conversion."""
    pointers = {"h_ptr": "*bf16", "counts_ptr": "*i32", "q_ptr": "*u8", "scale_ptr": "*i32" if arch == 100 else "*fp32"}
    constants = {"HAS_LIMIT": True, "UE8M0": arch == 100, "GROUP": 128, "BLOCK_R": 16, "USE_CAST": True}
    kernel = compile_kernel(masked_swiglu_kernel, arch, pointers, constants, num_warps=4)
    ptx = kernel.asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2" in ptx
    assert "ld.global" in ptx
    assert "local" not in ptx.split(".entry", 1)[1]
