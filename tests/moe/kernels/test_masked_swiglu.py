"""G69: the activation between DeepGEMM's two GEMMs touches live rows alone: interpreted, and compiled for its GPUs."""

from moe.kernels.masked_swiglu import masked_swiglu_kernel
from tests.interpreter import RunInterpreted, waits_for_interpreter
from tests.moe.kernels.compiling import compile_kernel
from tests.tables import rows

pytestmark = waits_for_interpreter


def test_live_rows_equal_the_reference_and_no_others_are_touched(run_interpreted: RunInterpreted) -> None:
    wrong = run_interpreted("tests.moe.kernels.interpreted_swiglu")
    assert len(wrong) == 8
    assert {case: what for case, what in wrong.items() if what} == {}


@rows("arch", 90, 100)
def test_it_compiles_for_the_gpus_of_deep_gemm(arch: int) -> None:
    """fp32 scales on SM90, packed exponents on SM100; bytes come from the hardware's own conversion."""
    pointers = {"h_ptr": "*bf16", "counts_ptr": "*i32", "q_ptr": "*u8", "scale_ptr": "*i32" if arch == 100 else "*fp32"}
    constants = {"HAS_LIMIT": True, "UE8M0": arch == 100, "GROUP": 128, "BLOCK_R": 16, "USE_CAST": True}
    kernel = compile_kernel(masked_swiglu_kernel, arch, pointers, constants, num_warps=4)
    ptx = kernel.asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2" in ptx
    assert "ld.global" in ptx
    assert "local" not in ptx.split(".entry", 1)[1]
