"""`columns`: numbers and order among ranks in the interpreter, machine code for every GPU."""

import re

from moe.kernels.columns import gather_columns
from tests.interpreter import RunInterpreted
from tests.moe.kernels.compiling import compile_kernel, of_hopper_and_others, reached_before


def test_ranks_wait_for_the_columns_of_all(run_interpreted: RunInterpreted) -> None:
    """In the planted fault a rank copies what others have not written yet."""
    wrong = run_interpreted("tests.moe.kernels.interpreted_columns")
    assert wrong.pop("no wait") > 0
    assert wrong == {"two ranks": 0, "three ranks": 0}


@of_hopper_and_others
def test_the_kernel_compiles_writes_before_the_flags_and_reads_after_them(arch: int) -> None:
    pointers = {"own_ptr": "*fp32", "out_ptr": "*fp32", "memories_ptr": "*i64", "flags_ptr": "*i64"}
    for num_ranks in (2, 8):
        constants = {"RANKS": num_ranks, "MAX_RANKS": 8, "BLOCK": 1024, "USE_PDL": arch >= 90}
        kernel = compile_kernel(gather_columns, arch, pointers, constants, num_warps=4)
        lines = [line.strip() for line in kernel.asm["ptx"].splitlines()]
        assert "cubin" in kernel.asm
        [told] = [
            i for i, line in enumerate(lines) if re.search(r"atom\.global\.(sys\.release|release\.sys)\.exch", line)
        ]
        [heard] = [i for i, line in enumerate(lines) if ".cas." in line]
        written = [i for i, line in enumerate(lines) if "st.global" in line and i < told]
        assert len(written) >= num_ranks - 1
        assert any(line.startswith("bar.sync") for line in lines[written[-1] : told]), "others may be told too early"
        assert all(i > heard for i, line in enumerate(lines) if "ld.global.cg" in line), "columns are read too early"
        if arch >= 90:
            early = reached_before(kernel.asm["ptx"], "griddepcontrol.wait")
            assert "st.global" not in early
            assert "atom." not in early
