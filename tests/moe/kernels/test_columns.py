"""`columns`: numbers and order among ranks in the interpreter, machine code for every GPU."""

import re

from moe.kernels.columns import gather_columns
from tests.interpreter import RunInterpreted
from tests.moe.kernels.compiling import compile_kernel, of_hopper_and_others, reached_before


def test_ranks_wait_for_the_columns_of_all(run_interpreted: RunInterpreted) -> None:
    """In the planted fault a rank copies what others have not written yet."""
    wrong = run_interpreted("tests.moe.kernels.interpreted_ranks", "columns")
    assert wrong.pop("no wait") > 0
    assert wrong == {"two": 0, "three": 0}


@of_hopper_and_others
def test_the_kernel_compiles_writes_before_the_flags_and_reads_after_them(arch: int) -> None:
    pointers = {"own_ptr": "*fp32", "out_ptr": "*fp32", "memories_ptr": "*i64", "flags_ptr": "*i64"}
    for num_ranks in (2, 8):
        constants = {"RANKS": num_ranks, "MAX_RANKS": 8, "BLOCK": 1024, "USE_PDL": arch >= 90}
        kernel = compile_kernel(gather_columns, arch, pointers, constants, num_warps=4)
        assert "cubin" in kernel.asm
        ptx = kernel.asm["ptx"]
        written, read = re.split(r"atom\.global\.(?:sys\.release|release\.sys)\.exch", ptx)
        assert written.count("st.global") >= num_ranks - 1
        assert "bar.sync" in written[written.rindex("st.global") :], "others may be told too early"
        assert "ld.global.cg" not in written + re.split(r"\.cas\.", read, maxsplit=1)[0], "columns are read too early"
        assert ptx.count(".cas.") == 1
        if arch >= 90:
            assert not re.search(r"st\.global|atom\.", reached_before(ptx, "griddepcontrol.wait"))
