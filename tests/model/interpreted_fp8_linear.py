"""Multiplies FP8 blocks in Triton's interpreter; prints the largest relative error of each case as JSON.

Started as a program of its own, since Triton decides when it is imported whether it compiles or interprets.
"""

import json
import sys
from dataclasses import dataclass

import torch

from model import fp8_linear
from model.fp8_linear import BATCH_PLANS, DECODE_PLANS, PREFILL_PLANS, Fp8Linear, LinearPlan
from moe.formats import Fp8BlockWeight

G = torch.Generator().manual_seed(0)


@dataclass(frozen=True)
class Shape:
    num_tokens: int
    num_outputs: int
    num_cols: int
    has_bias: bool = False
    pitch: int = 0  # further apart than the rows of x are long


def error(shape: Shape, plan: LinearPlan | None = None) -> float:
    """Of all outputs, against the weights dequantized in fp32; scales differ from block to block by up to 2^8."""
    spread = torch.exp2(torch.randint(-4, 5, (-(-shape.num_outputs // 128), -(-shape.num_cols // 128)), generator=G))
    weight = Fp8BlockWeight.quantize(torch.randn(shape.num_outputs, shape.num_cols, generator=G))
    weight = Fp8BlockWeight(weight.data, weight.scale_inv * spread)
    bias = torch.randn(shape.num_outputs, generator=G) * 100 if shape.has_bias else None
    x = torch.randn(shape.num_tokens, shape.num_cols + shape.pitch, generator=G)[:, : shape.num_cols]
    choose = fp8_linear.choose_plan
    try:
        if plan is not None:
            fp8_linear.choose_plan = lambda *_: plan
        got = Fp8Linear(weight, bias)(x)
    finally:
        fp8_linear.choose_plan = choose
    want = torch.nn.functional.linear(x.double(), weight.dequantize().double(), None if bias is None else bias.double())
    return float((got.double() - want).norm() / want.norm())


def main() -> None:
    errors = {
        f"{plan}": error(Shape(2 * plan.block_m + 3, 2 * plan.block_n + 40, 256), plan)
        for plan in (*DECODE_PLANS, *BATCH_PLANS, *PREFILL_PLANS)
    }
    errors |= {
        "one token": error(Shape(1, 200, 384)),
        "a ragged last block of columns": error(Shape(5, 130, 328)),
        "fewer columns than a block": error(Shape(3, 128, 40)),
        "bias and rows that are apart": error(Shape(17, 300, 128, has_bias=True, pitch=24)),
        "more token tiles than a group": error(Shape(16 * 11, 32, 128), DECODE_PLANS[2]),
        "no tokens": float(Fp8Linear(Fp8BlockWeight.quantize(torch.ones(4, 128)), None)(torch.ones(0, 128)).numel()),
    }
    json.dump(errors, sys.stdout)


if __name__ == "__main__":
    main()
