"""Routes by sigmoid scores in Triton's interpreter; prints how far the weights are from torch's as JSON."""

import json
import sys

import torch

from moe.config import RoutingConfig, RoutingMethod
from moe.kernels import router
from moe.routing import route

G = torch.Generator().manual_seed(0)


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    """Both ends included."""
    return torch.randint(low, high + 1, shape, generator=G).bfloat16()


def error(
    num_tokens: int, num_experts: int, top_k: int,
    *, groups: tuple[int, int] = (1, 1), corrections: int | None = 3, normalize: bool = True, has_bias: bool = False,
    spoil: bool = False, logits_dtype: torch.dtype = torch.float32,
) -> float:  # fmt: skip
    """The largest of a weight; infinite where an id differs.

    Small integers, so that sums are exact and there are many ties. `corrections`: quarters from minus so many up.
    """
    config = RoutingConfig(
        method=RoutingMethod.SIGMOID_GROUPED, num_experts=num_experts, top_k=top_k, num_groups=groups[0],
        num_kept_groups=groups[1], normalize=normalize, routed_scaling_factor=2.5,
    )  # fmt: skip
    x, weight = integers(-1, 1, num_tokens, 200), integers(-1, 1, num_experts, 200)
    x[:, 20:] *= (torch.rand(num_tokens, 180, generator=G) < 0.05).bfloat16()  # logits of a few units
    if spoil:
        x[1, 3], x[2, 5] = float("nan"), float("inf")
        weight[: num_experts // 2, 5] = 0  # an infinite token is no number for half of the experts
    bias = integers(-2, 2, num_experts).float() if has_bias else None
    correction = None if corrections is None else integers(-corrections, corrections, num_experts).float() / 4
    got = router.route(x, weight, bias, config, correction, logits_dtype=logits_dtype)
    logits = torch.nn.functional.linear(x.float(), weight.float(), bias).to(logits_dtype)
    want = route(logits, config, correction)
    if not torch.equal(got.ids, want.ids) or got.ids.dtype != want.ids.dtype:
        return float("inf")
    if not torch.equal(got.weights.isnan(), want.weights.isnan()) or (not spoil and got.weights.isnan().any()):
        return float("inf")
    return (got.weights.double() - want.weights.double()).nan_to_num(0.0).abs().max().item()


if __name__ == "__main__":
    errors = {
        "DeepSeek-V3": error(5, 256, 8, groups=(8, 4)),
        "a quarter of its experts": error(40, 64, 8, groups=(8, 4)),
        "one token": error(1, 64, 8, groups=(8, 4)),
        "few tokens": error(3, 64, 8, groups=(8, 4)),
        "groups of two, one kept": error(9, 16, 2, groups=(8, 1)),
        "ties everywhere": error(20, 32, 6, groups=(4, 2), corrections=0),
        "negative choices": error(20, 32, 6, groups=(4, 3), corrections=30),
        "no groups, an odd number of experts": error(9, 24, 5),
        "no correction, not normalized": error(9, 32, 4, groups=(4, 2), corrections=None, normalize=False),
        "a gate with a bias, bf16 logits": error(9, 32, 4, groups=(4, 2), has_bias=True, logits_dtype=torch.bfloat16),
        "tokens that are no numbers": error(4, 32, 8, groups=(8, 4), spoil=True),
        "many tokens": error(1030, 16, 2, groups=(4, 2)),
    }
    json.dump(errors, sys.stdout)
