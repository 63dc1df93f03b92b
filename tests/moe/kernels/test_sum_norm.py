"""`sum_norm`: numbers and order among ranks in the interpreter, machine code for every GPU."""

import re

from moe.kernels.sum_norm import sum_add_rms_norm
from tests.interpreter import RunInterpreted
from tests.moe.kernels.compiling import compile_kernel, of_hopper_and_others, reached_before


def test_ranks_wait_for_the_parts_of_all(run_interpreted: RunInterpreted) -> None:
    """In the planted faults a rank reads too early, or what another wrote elsewhere."""
    wrong = run_interpreted("tests.moe.kernels.interpreted_ranks", "sums")
    assert min(wrong.pop("no wait"), wrong.pop("wrong place")) > 0
    assert wrong == {"two": 0, "two, fp16": 0, "three": 0}


@of_hopper_and_others
def test_the_kernel_compiles_and_reads_after_the_flags(arch: int) -> None:
    pointers = {
        "parts_ptr": "*i64", "flags_ptr": "*i64", "x_ptr": "*bf16", "weight_ptr": "*fp32", "sum_ptr": "*bf16",
        "out_ptr": "*bf16",
    }  # fmt: skip
    for hidden, num_warps, num_ranks, has_x in ((2880, 8, 2, False), (7168, 16, 8, True)):
        constants = {
            "H": hidden, "H_PAD": 4096 if hidden < 4096 else 8192, "RANKS": num_ranks, "MAX_RANKS": 8,
            "HAS_X": has_x, "USE_PDL": arch >= 90,
        }  # fmt: skip
        kernel = compile_kernel(sum_add_rms_norm, arch, pointers, constants, num_warps=num_warps)
        ptx = kernel.asm["ptx"]
        assert "cubin" in kernel.asm
        assert re.search(r"atom\.global\.(sys\.release|release\.sys)\.exch", ptx)
        assert re.search(r"atom\.global\.(acquire\.sys|sys\.acquire)\.cas", ptx)
        # The parts, and nothing else, bypass the L1; vectors of 16 bytes.
        assert len(re.findall(r"ld\.global\.cg", ptx)) == len(re.findall(r"ld\.global\.cg\.v4\.b32", ptx)) > 0
        before = [line for line in ptx.splitlines() if "ld.global.cg" in line or ".cas." in line]
        assert ".cas." in before[0], "a part is read before its flag"
        if arch >= 90:
            assert not re.search(r"st\.global|atom\.", reached_before(ptx, "griddepcontrol.wait"))
