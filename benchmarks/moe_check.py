"""Compares a contender with the fp32 twin before it is timed: fresh inputs, poisoned outputs, some ids -1."""

from dataclasses import dataclass

import torch

from benchmarks.moe_cases import LayerCase
from benchmarks.moe_contenders import Contender
from moe.check.reference import reference_moe
from moe.formats import ExpertWeights
from moe.routing import StandardTopK

MAX_ROWS = 512  # tokens that the twin computes
# bf16 products give 0.004; the kernels that round activations to FP8 before either product give 0.04 to 0.06.
MAX_ERROR = {"bf16": 0.01, "mxfp4": 0.01, "nvfp4": 0.01, "fp8_block": 0.1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What every contender must compute for one input; rows are tokens that were picked for the comparison."""

    x_TH: torch.Tensor
    topk: StandardTopK  # every token with all of its experts
    gappy: StandardTopK  # the same, but token 1 lacks an expert and token 2 has none
    rows_R: torch.Tensor
    want_RH: torch.Tensor  # of `gappy`
    is_whole_R: torch.Tensor  # rows that `topk` and `gappy` agree on
    max_error: float


def expect(
    case: LayerCase, experts: ExpertWeights, x_TH: torch.Tensor, topk: StandardTopK, generator: torch.Generator
) -> Expected:
    """Run the twin."""
    num_tokens = x_TH.shape[0]
    ids = topk.ids.clone()
    ids[1:2, 0] = -1
    ids[2:3] = -1
    gappy = StandardTopK(topk.weights, ids)
    others = torch.randperm(num_tokens, generator=generator, device=generator.device)
    others = others[others > 2][: MAX_ROWS - 3].to(x_TH.device)
    rows = torch.cat((torch.arange(min(3, num_tokens), device=x_TH.device), others))
    want = reference_moe(x_TH[rows], StandardTopK(topk.weights[rows], ids[rows]), experts, case.activation)
    return Expected(
        x_TH=x_TH, topk=topk, gappy=gappy, rows_R=rows, want_RH=want,
        is_whole_R=(topk.ids[rows] == ids[rows]).all(dim=1), max_error=MAX_ERROR[experts.format_name],
    )  # fmt: skip


def check(contender: Contender, expected: Expected) -> float:
    """Relative error of a whole call; that of its worst token may be four times the format's limit.

    Raises:
        ValueError: an unwritten or wrong output, or, for ours, bits that change from run to run.
    """
    topk = expected.gappy if contender.skips_no_expert else expected.topk
    x_TH, routing = contender.tokens(expected.x_TH), contender.stage(topk)
    torch.use_deterministic_algorithms(True, warn_only=True)  # makes every torch.empty a tensor of NaN
    try:
        out_TH = contender.run(0, x_TH, routing)
        again_TH = contender.run(0, x_TH, routing)
    finally:
        torch.use_deterministic_algorithms(False)
    got_RH, want_RH = out_TH[expected.rows_R, : expected.want_RH.shape[1]].float(), expected.want_RH
    if not contender.skips_no_expert:
        got_RH, want_RH = got_RH[expected.is_whole_R], want_RH[expected.is_whole_R]
    if not bool(torch.isfinite(out_TH[:, : want_RH.shape[1]]).all()):
        raise ValueError("the output has numbers that nothing wrote, or that are not finite")
    if contender.is_ours and not torch.equal(out_TH, again_TH):
        raise ValueError("two runs on the same inputs differ")
    norm_R = want_RH.norm(dim=1)
    error_R = (got_RH - want_RH).norm(dim=1)
    error = float(error_R.norm() / norm_R.norm())
    worst = float((error_R / norm_R.clamp_min(1e-3 * float(norm_R.max()))).max())
    if error > expected.max_error or worst > 4 * expected.max_error:
        raise ValueError(f"relative error {error:.4f}, of the worst token {worst:.4f}: not what the twin computes")
    return round(error, 6)
