"""Runs the fused kernels of the forward pass in Triton's interpreter; prints the largest error of each case as JSON.

Started as a program of its own, since Triton decides when it is imported whether it compiles or interprets.
"""

import json
import sys

import torch

from model import few_rows
from model.gpu_kernels import add_rms_norm, embed, rms_norm
from moe.config import RoutingConfig, RoutingMethod
from moe.kernels import router
from moe.routing import route

G = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=G)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return (got.double() - want.double()).abs().max().item()


def norm_errors() -> dict[str, float]:
    wide, delta, weight = normal(5, 100), normal(5, 72), normal(72)
    x = wide[:, 9:81]  # rows further apart than they are long
    want = torch.nn.functional.rms_norm(x + delta, (72,), weight, 1e-5)
    total, normed = add_rms_norm(x, delta, weight, 1e-5)
    x_16, delta_16 = x.half(), delta.half()  # the interpreter truncates to bf16
    want_16 = torch.nn.functional.rms_norm((x_16 + delta_16).float(), (72,), weight, 1e-5).half()
    sum_16, normed_16 = add_rms_norm(x_16, delta_16, weight, 1e-5)
    share_of_others = (normed_16 != want_16).float().mean().item()  # a last bit may differ here and there
    return {
        "the norm is of the rounded sum": error(sum_16, x_16 + delta_16) + max(0.0, share_of_others - 0.03),
        "sum": error(total, x + delta),
        "norm of a sum": error(normed, want),
        "norm alone": error(rms_norm(x, weight, 0.5), torch.nn.functional.rms_norm(x, (72,), weight, 0.5)),
        "no tokens": float(add_rms_norm(x[:0], delta[:0], weight, 1e-5)[1].numel()),
    }


def router_error(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    has_bias: bool = True,
    spoil: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    largest_weight: int = 1,
) -> float:
    """Of the weights; infinite where an id differs."""
    config = RoutingConfig(
        method=RoutingMethod.SOFTMAX_AFTER_TOPK, num_experts=num_experts, top_k=top_k, routed_scaling_factor=1.5
    )
    # Small integers: every sum is exact, so that ties are ties, and there are many.
    x = torch.randint(-2, 3, (num_tokens, 200), generator=G).bfloat16()
    weight = torch.randint(-largest_weight, largest_weight + 1, (num_experts, 200), generator=G).bfloat16()
    if spoil:
        x[1, 3], x[2, 5] = float("nan"), float("inf")
    bias = torch.randint(-2, 3, (num_experts,), generator=G).float() if has_bias else None
    got = router.route(x, weight, bias, config, logits_dtype=logits_dtype)
    want = route(torch.nn.functional.linear(x.float(), weight.float(), bias).to(logits_dtype), config)
    same = torch.equal(got.ids, want.ids) and got.ids.dtype == want.ids.dtype
    return error(got.weights, want.weights) if same else float("inf")


def router_ids_of_nothing() -> torch.Tensor:
    config = RoutingConfig(method=RoutingMethod.SOFTMAX_AFTER_TOPK, num_experts=8, top_k=2)
    return router.route(normal(0, 16).bfloat16(), normal(8, 16).bfloat16(), None, config).ids


def few_rows_error(num_rows: int, num_outputs: int, num_inputs: int, *, has_bias: bool = True) -> float:
    """Small integers again, of which bf16 holds every sum. The same counters serve one launch after the other."""
    x = torch.randint(-1, 2, (num_rows, num_inputs + 3), generator=G).bfloat16()[:, 3:]
    weight = torch.randint(-1, 2, (num_outputs, num_inputs), generator=G).bfloat16()
    bias = torch.randint(-9, 10, (num_outputs,), generator=G).bfloat16() if has_bias else None
    want = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return max(error(few_rows.linear(x, weight, bias), want) for _ in "ab")


def embedding_error(num_tokens: int, num_rows: int, first_row: int, hidden: int) -> float:
    """Ids of this rank's rows, of rows before them and of rows after them."""
    ids = torch.randint(0, first_row + num_rows + 5, (num_tokens,), generator=G)
    weight, out = normal(num_rows, hidden), torch.full((num_tokens, hidden), float("nan"))
    embed(ids, weight, first_row, out)
    padded = torch.cat((torch.zeros(first_row, hidden), weight, torch.zeros(5, hidden)))
    return error(out, padded[ids]) if num_tokens else 0.0


def many_outputs_error() -> float:
    """With the tile of a head, and fp32 sums as they are."""
    num_outputs = few_rows.MANY_OUTPUTS + 3
    x, weight = (torch.randint(-40, 41, (rows, 260), generator=G).bfloat16() for rows in (2, num_outputs))
    out = torch.full((2, num_outputs), float("nan"))
    return error(few_rows.linear(x, weight, None, out), torch.nn.functional.linear(x.float(), weight.float()))


def main() -> None:
    errors = norm_errors() | {
        "embedding": embedding_error(20, 12, 6, 40),
        "embedding of a wide model": embedding_error(3, 4, 0, 2600),
        "embedding of no rows": embedding_error(5, 0, 7, 16),
        "embedding of no tokens": embedding_error(0, 4, 0, 16),
        "many outputs": many_outputs_error(),
        "a row in shares": few_rows_error(1, 40, 700),
        "rows in shares": few_rows_error(5, 70, 1000, has_bias=False),
        "rows in one share": few_rows_error(16, 33, 100),
        "no outputs": float(few_rows.linear(normal(2, 8).bfloat16(), normal(0, 8).bfloat16(), None).numel()),
        "no rows": float(few_rows.linear(normal(0, 8).bfloat16(), normal(8, 8).bfloat16(), None).numel()),
        "one token": router_error(1, 32, 4),
        "six experts, no bias": router_error(5, 6, 3, has_bias=False),
        "many tokens": router_error(600, 128, 4),
        "tokens that are no numbers": router_error(4, 8, 2, spoil=True),
        "logits of more than eight bits": router_error(40, 32, 4, largest_weight=60),
        "bf16 logits": router_error(40, 32, 4, largest_weight=60, logits_dtype=torch.bfloat16),
        "bf16 logits that are no numbers": router_error(4, 8, 2, spoil=True, logits_dtype=torch.bfloat16),
        "no tokens for the router": float("inf") if router_ids_of_nothing().numel() else 0.0,
    }
    json.dump(errors, sys.stdout)


if __name__ == "__main__":
    main()
