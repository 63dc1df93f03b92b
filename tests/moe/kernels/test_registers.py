"""On Hopper, no kernel writes a register that a running product may still read; Triton and ptxas do not see to that."""

from collections.abc import Callable
from typing import Any

import pytest

from model.attention import triton_kernels
from model.attention.triton import _PREFILL
from model.fp8_linear import PLANS
from moe.kernels.plan import Plan
from moe.tables import read_entries
from tests.model import test_fp8_linear, test_triton_attention
from tests.moe.kernels.compiling import compile_gemm, rest
from tests.moe.kernels.registers import overwritten_operands
from tests.tables import rows

_LOOP = """
top:
--:-:-:-:1\tWARPGROUP.DEPBAR.LE gsb0, 0x{left};
--:-:1:-:1\tLDSM.16.M88.4 R4, [R{address}];
--:-:-:-:1\tHMUL2.BF16_V2 R60, R4, R2.H0_H0;
--:-:-:-:1\tHGMMA.64x16x16.F32.BF16 R32, R60, gdesc[UR20], R32, gsb0;
--:-:-:-:1\tHGMMA.64x16x16.F32.BF16 R24, R48, gdesc[UR20], R24, gsb0;
--:-:-:-:1\tIMAD R{address}, R3, 0x200, R1;
--:-:-:-:5\t@P1 BRA top;
"""


_GROUPED = Plan(is_direct=False, block_m=16, block_n_1=128, block_n_2=128)
_SHARED = Plan(is_direct=True, block_m=16, block_n_1=64, block_n_2=64, split_k_1=2)  # two programs for each first tile


def _shipped() -> list[Any]:
    """Every plan of FP4 weights that this package brings for Hopper."""
    found = dict.fromkeys(
        (entry["format"], Plan(**step["plan"]))
        for entry in read_entries("triton_plans.json")
        if entry["arch"] == "sm90" and entry["format"] in ("mxfp4", "nvfp4")
        for step in entry["steps"]
    )
    return [rest(name, plan) for name, plan in found]


@rows("left, address, num_found", (0, 9, 0), (1, 9, 0), (2, 9, 1), (0, 62, 1), (0, 51, 1), (0, 64, 0))
def test_what_the_reader_of_machine_code_finds(left: int, address: int, num_found: int) -> None:
    num_products, found = overwritten_operands(_LOOP.format(left=left, address=address))
    assert num_products == 2
    assert len(set(found)) == num_found


@pytest.mark.parametrize(
    ("format_name", "plan"), [("mxfp4", _GROUPED), ("nvfp4", _GROUPED), ("mxfp4", _SHARED), *_shipped()]
)
def test_experts(format_name: str, plan: Plan) -> None:
    for is_first in (True, False):
        kernel = compile_gemm(format_name, plan, 90, is_first=is_first)
        num_products, found = overwritten_operands(kernel.asm["sass"])
        assert found == []
        assert (num_products > 0) == (plan.block_m >= 16)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "compiled",
    [
        lambda: test_fp8_linear.compiled(PLANS[-1], 90),
        lambda: test_triton_attention.compiled(
            triton_kernels.prefill, 90, _PREFILL,
            test_triton_attention.GPT_OSS | {"R_PAD": 8, "BLOCK_Q": _PREFILL.rows // 8, "BLOCK_N": 64, "WINDOW": 0},
        ),
        lambda: test_triton_attention.compiled_latent(90, "bf16", is_decode=False),
    ],
    ids=["fp8 linear", "attention", "latent attention"],
)  # fmt: skip
def test_the_model(compiled: Callable[[], Any]) -> None:
    num_products, found = overwritten_operands(compiled().asm["sass"])
    assert found == []
    assert num_products > 0
