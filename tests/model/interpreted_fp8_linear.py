"""Multiplies FP8 blocks in Triton's interpreter; prints the largest relative error of each case as JSON.

Started as a program of its own, since Triton decides when it is imported whether it compiles or interprets.
"""

import json
import sys
from dataclasses import dataclass, replace

import torch

from model.fp8_linear import PLANS, Fp8Linear, LinearPlan
from moe.formats import Fp8BlockWeight

G = torch.Generator().manual_seed(0)


@dataclass(frozen=True)
class Shape:
    num_tokens: int
    num_outputs: int
    num_cols: int
    has_bias: bool = False
    is_gated: bool = False
    pitch: int = 0  # further apart than the rows of x are long


def error(shape: Shape, plan: LinearPlan | None = None) -> float:
    """Of all outputs, against the weights dequantized in fp32; scales differ from block to block by up to 2^8.

    Computed twice, since the second launch needs the counters as the first one found them.
    """
    spread = torch.exp2(torch.randint(-4, 5, (-(-shape.num_outputs // 128), -(-shape.num_cols // 128)), generator=G))
    weight = Fp8BlockWeight.quantize(torch.randn(shape.num_outputs, shape.num_cols, generator=G))
    weight = Fp8BlockWeight(weight.data, weight.scale_inv * spread)
    bias = torch.randn(shape.num_outputs, generator=G) * 100 if shape.has_bias else None
    x = torch.randn(shape.num_tokens, shape.num_cols + shape.pitch, generator=G)[:, : shape.num_cols]
    layer = Fp8Linear(weight, bias, is_gated=shape.is_gated)
    want = torch.nn.functional.linear(x.double(), weight.dequantize().double(), None if bias is None else bias.double())
    if shape.is_gated:
        gate, up = want.chunk(2, dim=-1)
        want = torch.nn.functional.silu(gate) * up
    first, second = (layer(x, plan) for _ in "ab")
    return float((first.double() - want).norm() / want.norm()) if torch.equal(first, second) else float("inf")


def main() -> None:
    no_columns = Fp8BlockWeight.quantize(torch.ones(64, 0))  # as a rank may have
    errors = {
        f"{plan}": error(
            Shape(min(2 * plan.block_m, 128) + 3, 2 * plan.block_n + 40, 384), replace(plan, shares=shares)
        )
        for plan, shares in zip(PLANS, (2, 1, 3, 1, 1), strict=True)
    }
    errors |= {
        "one token": error(Shape(1, 200, 384)),
        "a ragged last block of columns": error(Shape(5, 130, 328)),
        "fewer columns than a block": error(Shape(3, 128, 40)),
        "bias and rows that are apart": error(Shape(17, 300, 256, has_bias=True, pitch=24)),
        "more token tiles than a group": error(Shape(8 * 11, 64, 128), PLANS[0]),
        "gate and up in shares": error(Shape(3, 2 * 200, 512, is_gated=True), replace(PLANS[0], shares=4)),
        "gate and up in halves": error(Shape(20, 2 * 72, 256, is_gated=True), PLANS[2]),
        "no columns": float((Fp8Linear(no_columns, torch.ones(64))(torch.ones(2, 0)) - 1).abs().max()),
        "no tokens": float(Fp8Linear(Fp8BlockWeight.quantize(torch.ones(4, 128)), None)(torch.ones(0, 128)).numel()),
    }
    json.dump(errors, sys.stdout)


if __name__ == "__main__":
    main()
