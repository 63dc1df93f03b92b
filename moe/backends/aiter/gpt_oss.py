"""GPT-OSS's MXFP4 experts for aiter: padding, biases, interleaved halves, and the arguments that go with them.

We use the gate mode `interleave`: below 256 rows activations stay bf16, from 256 on they are rounded to FP8. The other
mode would round them to FP4. Alpha and beta are constants of the kernels, and below 256 rows the limit is one too.
Shape letters: L local experts, R rows, H hidden, I intermediate; P marks a padded size.
"""

from dataclasses import dataclass

import torch

from moe.config import Activation
from moe.formats import ExpertWeights, Mxfp4Weight
from moe.formats.sizes import expert_bytes
from moe.layouts.aiter import mark_shuffled, shuffle_e8m0, shuffle_weight
from moe.layouts.rows import interleave_halves, padded, round_up
from moe.topology import Topology

GPT_OSS = Activation(alpha=1.702, beta=1.0, limit=7.0)
ARGUMENTS = frozenset(("bias1", "bias2", "hidden_pad", "intermediate_pad", "swiglu_limit", "gate_mode"))
TILE = 256  # both sizes are padded to a multiple of this
GATE_MODE = "interleave"
HALF_ROWS = 16  # gate and up alternate in groups of this many rows


@dataclass(frozen=True, kw_only=True, slots=True)
class GptOssParts:
    """What a layer with GPT-OSS's activation needs besides its weights; sizes in elements."""

    b13: torch.Tensor | None  # fp32 [L, 2IP], [gate; up], each half padded with zeros
    b2: torch.Tensor | None  # fp32 [L, HP]
    hidden_size: int
    hidden_pad: int
    intermediate_pad: int

    def arguments(self) -> dict[str, object]:
        """Keywords of `fused_moe`."""
        return {
            "bias1": self.b13, "bias2": self.b2, "hidden_pad": self.hidden_pad,
            "intermediate_pad": self.intermediate_pad, "swiglu_limit": GPT_OSS.limit, "gate_mode": GATE_MODE,
        }  # fmt: skip

    def pad(self, x_RH: torch.Tensor) -> torch.Tensor:
        """[R, HP] with zeros at the end."""
        return torch.nn.functional.pad(x_RH, (0, self.hidden_pad)) if self.hidden_pad else x_RH

    def unpad(self, out_RP: torch.Tensor) -> torch.Tensor:
        """[R, H]; what the kernel left in the padding is cut off."""
        return out_RP[:, : self.hidden_size].contiguous() if self.hidden_pad else out_RP


@dataclass(frozen=True, kw_only=True, slots=True)
class GptOssWeights:
    """Packed weights [L, 2IP, HP/2] and [L, HP, IP/2] with shuffled exponents, and the rest."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    parts: GptOssParts


def padded_expert_bytes(hidden: int, inter: int, *, has_bias: bool) -> int:
    """Bytes of one expert as `prepare_gpt_oss` lays it out."""
    sizes = (round_up(hidden, TILE), max(round_up(inter, TILE), TILE))
    return expert_bytes("mxfp4", *sizes, torch.float32.itemsize if has_bias else 0)


def prepare_gpt_oss(experts: ExpertWeights, w13: Mxfp4Weight, w2: Mxfp4Weight, topology: Topology) -> GptOssWeights:
    """Lay out `w13` and `w2`, which are the experts' own on the device. A rank without a block gets zeros."""
    hidden, inter = experts.hidden_size, experts.intermediate_size
    padded_hidden, padded_inter = round_up(hidden, TILE), max(round_up(inter, TILE), TILE)

    def both_halves(rows_LFC: torch.Tensor, num_cols: int) -> torch.Tensor:
        halves = [padded(half, padded_inter, num_cols) for half in rows_LFC.split(inter, dim=1)] if inter else []
        return torch.cat(halves, dim=1) if halves else rows_LFC.new_zeros(len(rows_LFC), 2 * padded_inter, num_cols)

    codes13 = interleave_halves(both_halves(w13.codes, padded_hidden // 2), HALF_ROWS)
    scales13 = interleave_halves(both_halves(w13.scales, padded_hidden // 32), HALF_ROWS)
    codes2 = padded(w2.codes, padded_hidden, padded_inter // 2)
    scales2 = padded(w2.scales, padded_hidden, padded_inter // 32)
    b13 = b2 = None
    if experts.b13 is not None and experts.b2 is not None:
        b13 = both_halves(experts.b13.to(topology.device).float()[..., None], 1).squeeze(-1)
        b2 = padded(experts.b2.to(topology.device).float()[..., None], padded_hidden, 1).squeeze(-1)
        b2 = b2 * (topology.tp_rank == 0)  # only one of the summed ranks adds the bias
    return GptOssWeights(
        w13=_packed(codes13), w13_scale=shuffle_e8m0(scales13.flatten(0, 1)),
        w2=_packed(codes2), w2_scale=shuffle_e8m0(scales2.flatten(0, 1)),
        parts=GptOssParts(
            b13=b13, b2=b2, hidden_size=hidden, hidden_pad=padded_hidden - hidden, intermediate_pad=padded_inter - inter
        ),
    )  # fmt: skip


def _packed(codes_LNC: torch.Tensor) -> torch.Tensor:
    return mark_shuffled(shuffle_weight(codes_LNC).view(torch.float4_e2m1fn_x2))
