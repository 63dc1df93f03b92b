"""aiter's `fused_moe`: checks what the kernel relies on, undoes the shuffles by their byte maps, computes in fp32.

The library: ROCm/aiter at commit e404860 (2026-08-22), aiter/fused_moe.py, aiter/ops/shuffle.py, moe_sorting_opus.h.
A mask means expert parallelism there: top-k loses one for a last column that is always masked, with top-1 and without
that column the choice of split-K divides by zero. Ids live in the space of the mask; one outside it, -1 included, is
refused, and so are two equal ids of a row without a mask, of which the sorting keeps either. Rows past
`num_local_tokens` come back as NaN. `wide` returns fp32 instead of bf16, so that a test compares arithmetic alone.
"""

import enum
import functools
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.emulators import numbers
from tests.emulators.device import pretend_rocm
from tests.emulators.experts import DenseExperts
from tests.emulators.refusal import need

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


class QuantType(enum.Enum):
    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5


class ActivationType(enum.Enum):
    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2


@functools.cache
def weight_positions(num_rows: int, num_bytes: int, element_size: int = 1) -> torch.Tensor:
    """[rows, bytes] flat position of every byte: tiles of 16 rows and 32 elements, pieces of 16 bytes."""
    row, byte = torch.arange(num_rows)[:, None], torch.arange(num_bytes)
    width = 32 * element_size
    tile = row // 16 * 16 * num_bytes + byte // width * 16 * width
    return tile + byte % width // 16 * 256 + row % 16 * 16 + byte % 16


@functools.cache
def scale_positions(num_rows: int, num_cols: int) -> torch.Tensor:
    """[rows, cols] flat position of every exponent of a matrix padded to multiples of (256, 8)."""
    row, col = torch.arange(num_rows)[:, None], torch.arange(num_cols)
    cols = (num_cols + 7) // 8 * 8
    block = (row // 32 * (cols // 8) + col // 8) * 256
    return block + col % 4 * 64 + row % 16 * 4 + col % 8 // 4 * 2 + row % 32 // 16


def unshuffle_weight(weight: torch.Tensor) -> torch.Tensor:
    """[E, N, K] back to row-major, in the same dtype."""
    octets = weight.view(torch.uint8)
    flat = octets.flatten(1)[:, weight_positions(*octets.shape[1:], weight.element_size())]
    return flat.contiguous().view(weight.dtype)


def even_mxfp4(x: torch.Tensor) -> torch.Tensor:
    """fp32 through MXFP4 and back: the exponent comes from amax rounded to two bits of mantissa."""
    groups = x.float().unflatten(-1, (-1, 32))
    bits = groups.abs().amax(-1, keepdim=True).contiguous().view(torch.int32) + 0x200000
    exponent = ((bits >> 23) & 255) - 127 - 2
    scale = torch.exp2(exponent.clamp(-127, 127).float())
    codes = numbers.fp4_codes((groups / scale).flatten(-2))
    return (numbers.fp4_values(codes).unflatten(-1, (-1, 32)) * scale).flatten(-2)


def per_token_fp8(x: torch.Tensor) -> torch.Tensor:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return numbers.fake_fp8(x.float() / scale, 1.0) * scale


def mxfp8(x: torch.Tensor) -> torch.Tensor:
    """fp32 through e4m3 and back, one power of two per 32."""
    groups = x.float().unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448)))
    return (numbers.fake_fp8(groups / scale, 1.0) * scale).flatten(-2)


@dataclass
class Aiter:
    """`calls` keeps every launch, `exact` the last result in fp32.

    `has_fp4_port`: the shape is tuned for the kernels of MXFP4 times MXFP4, whose sorting would ignore a mask.
    """

    arch: str
    wide: bool
    has_fp4_port: bool = False
    calls: list[SimpleNamespace] = field(default_factory=list)
    exact: torch.Tensor | None = None

    def fused_moe(
        self, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weight: torch.Tensor,
        topk_ids: torch.Tensor, expert_mask: torch.Tensor | None = None,
        activation: ActivationType = ActivationType.Silu, quant_type: QuantType = QuantType.No,
        w1_scale: torch.Tensor | None = None, w2_scale: torch.Tensor | None = None,
        a1_scale: torch.Tensor | None = None, num_local_tokens: torch.Tensor | None = None,
        dtype: torch.dtype | None = None, hidden_pad: int = 0, intermediate_pad: int = 0,
        bias1: torch.Tensor | None = None, bias2: torch.Tensor | None = None,
        swiglu_limit: float | None = None, gate_mode: str | None = "separated",
    ) -> torch.Tensor:  # fmt: skip
        """The library's other arguments are not emulated, so a call that has them fails."""
        call = SimpleNamespace(**{name: value for name, value in locals().items() if name != "self"})
        self.calls.append(call)
        num_rows = hidden_states.shape[0]
        num_real = num_rows if num_local_tokens is None else int(num_local_tokens)
        need(num_rows > 0, "no rows: the kernel has no guard")
        need(0 <= num_real <= num_rows, "num_local_tokens exceeds the rows")
        need(dtype == torch.bfloat16, "dtype")
        need(topk_ids.dtype == torch.int32 and topk_ids.shape[0] == num_rows, "topk_ids must be int32 [R, K]")
        need(topk_weight.dtype == torch.float32 and topk_weight.shape == topk_ids.shape, "weights are fp32 [R, K]")
        self._look_up_tuned(call)
        local = self._local_ids(call, topk_ids[:num_real])
        x = self._tokens(call)[:num_real]
        result = torch.full((num_rows, w2.shape[1]), float("nan"))
        result[:num_real] = self._experts(call).run(x, local, topk_weight[:num_real])
        if hidden_pad:
            result[:, w2.shape[1] - hidden_pad // 64 * 64 :] = float("nan")  # not written
        self.exact = result
        return result if self.wide else result.bfloat16()

    def _look_up_tuned(self, call: SimpleNamespace) -> None:
        """The key of the tables, and split-K where the tables lack it."""
        call.tuned_top_k = call.topk_ids.shape[1] - (call.expert_mask is not None)
        num_experts, inter = call.w1.shape[0], call.w1.shape[1] // 2
        num_rows = 1 << max(call.hidden_states.shape[0] - 1, 0).bit_length()
        is_one_stage = call.quant_type is QuantType.per_128x128 and num_rows > 32
        if call.quant_type in (QuantType.per_128x128, QuantType.per_1x32) and not is_one_stage:
            slots, num_units = num_rows * call.tuned_top_k, 256
            tiles = -(-inter // 128) * slots
            if slots <= num_experts and tiles < num_units:
                call.split_k = -(-num_units // tiles)  # by zero, as the library does
        if self.has_fp4_port and call.quant_type is QuantType.per_1x32 and call.expert_mask is not None:
            raise NotImplementedError("MXFP4 a4w4 FlyDSL port does not support expert-parallel yet")

    def _local_ids(self, call: SimpleNamespace, ids: torch.Tensor) -> torch.Tensor:
        mask, num_experts = call.expert_mask, call.w1.shape[0]
        if mask is None:
            need(bool(((ids >= 0) & (ids < num_experts)).all()), "an id that is no expert")
            self._need_distinct(ids)
            return ids
        need(mask.dtype == torch.int32, "expert_mask must be int32")
        need(int(mask.sum()) == num_experts, "the mask must count the experts that are here")
        need(bool(((ids >= 0) & (ids < mask.numel())).all()), "an id outside the mask")
        need(not bool(mask[ids[:, -1].long()].any()), "the last column is taken for one that is always masked")
        local = torch.where(mask.bool(), torch.cumsum(mask, 0) - 1, -1)[ids.long()]
        self._need_distinct(torch.where(local < 0, -1 - torch.arange(ids.shape[1]), local))
        return local

    def _need_distinct(self, ids: torch.Tensor) -> None:
        ordered = ids.sort(dim=1).values
        need(bool((ordered[:, 1:] != ordered[:, :-1]).all()), "two equal ids in a row: the sorting drops one")

    def _tokens(self, call: SimpleNamespace) -> torch.Tensor:
        x, scale = call.hidden_states, call.a1_scale
        need(x.is_contiguous(), "rows must be contiguous")
        if x.dtype == torch.bfloat16:
            need(scale is None, "scales of bf16 tokens")
            return x.float()
        need(call.quant_type is QuantType.per_128x128, "only FP8 blocks take FP8 tokens")
        need(x.dtype == (FNUZ if self.arch == "gfx942" else FN), "FP8 variant of this GPU")
        need(scale.dtype == torch.float32 and scale.shape == (x.shape[0], x.shape[1] // 128), "a1_scale")
        return x.float() * scale.repeat_interleave(128, -1)

    def _experts(self, call: SimpleNamespace) -> DenseExperts:
        need(all(getattr(weight, "is_shuffled", False) for weight in (call.w1, call.w2)), "weights are not shuffled")
        need(call.gate_mode in ("separated", "interleave"), "gate_mode")
        is_interleaved = call.gate_mode == "interleave"
        need(call.quant_type is QuantType.per_1x32 or not is_interleaved, "only MXFP4 is read interleaved")
        decode = {
            QuantType.No: self._bf16, QuantType.per_128x128: self._fp8_block,
            QuantType.per_Token: self._fp8_rows, QuantType.per_1x32: self._mxfp4,
        }[call.quant_type]  # fmt: skip
        w13 = (self._mxfp4_interleaved if is_interleaved else decode)(call.w1, call.w1_scale)
        w2 = decode(call.w2, call.w2_scale)
        need(w13.shape[1] == 2 * w2.shape[2] and w13.shape[2] == w2.shape[1], "weight shapes")
        need(call.hidden_states.shape[1] == w13.shape[2], "tokens have other columns than the weights")
        experts = DenseExperts(w13=w13, w2=w2, first_is_up=False)
        self._set_rounding(experts, call)
        if call.activation is ActivationType.Swiglu:
            need(call.quant_type is QuantType.per_1x32, "Swiglu has kernels for MXFP4 alone")
            self._set_swiglu(experts, call)
        else:
            need(call.activation is ActivationType.Silu, "activation")
            need(call.bias1 is None and call.bias2 is None, "biases beside Silu: dropped, or never tested")
        return experts

    def _set_rounding(self, experts: DenseExperts, call: SimpleNamespace) -> None:
        """Of the tokens, if they are bf16, and of what comes between the GEMMs."""
        round_one: Any = {
            QuantType.No: None, QuantType.per_128x128: numbers.fake_fp8_groups,
            QuantType.per_Token: per_token_fp8, QuantType.per_1x32: even_mxfp4,
        }[call.quant_type]  # fmt: skip
        is_interleaved = call.gate_mode == "interleave"
        if call.activation is ActivationType.Swiglu or is_interleaved:
            is_small = call.hidden_states.shape[0] < 256
            if is_small or (is_interleaved and self.arch != "gfx950"):
                round_one = None
            elif is_interleaved:
                round_one = mxfp8
        if round_one is not None:
            experts.quantize_mid = lambda mid, expert: round_one(mid)
            if call.hidden_states.dtype == torch.bfloat16:
                experts.quantize_in = lambda x, expert: round_one(x)

    def _set_swiglu(self, experts: DenseExperts, call: SimpleNamespace) -> None:
        """Constants of the kernels, fp32 biases, and padding that is neither read nor written."""
        num_experts, num_rows, num_cols = experts.w13.shape
        inter = num_rows // 2
        is_small = call.hidden_states.shape[0] < 256  # CK-Tile, which has no argument for the limit
        limit = 7.0 if is_small or call.swiglu_limit is None else call.swiglu_limit
        experts.alpha, experts.beta, experts.limit = (torch.full((num_experts,), v) for v in (1.702, 1.0, limit))
        for bias, size in ((call.bias1, num_rows), (call.bias2, experts.w2.shape[1])):
            if bias is not None and bias.dtype != torch.float32:
                raise TypeError(f"MoE bias must be fp32, got {bias.dtype}")
            need(bias is None or (bias.shape == (num_experts, size) and bias.is_contiguous()), "bias [E, N]")
        experts.b13, experts.b2 = call.bias1, call.bias2
        experts.w13[:, :, num_cols - call.hidden_pad // 128 * 128 :] = 0
        experts.w13.unflatten(1, (2, inter))[:, :, inter - call.intermediate_pad // 64 * 64 :] = 0
        experts.w2[:, :, inter - call.intermediate_pad // 128 * 128 :] = 0

    def _bf16(self, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        need(weight.dtype == torch.bfloat16 and scale is None, "bf16 weights without scales")
        return unshuffle_weight(weight).float()

    def _fp8(self, weight: torch.Tensor) -> torch.Tensor:
        need(weight.dtype == (FNUZ if self.arch == "gfx942" else FN), "FP8 variant of this GPU")
        values = unshuffle_weight(weight).float()
        need(not bool(values.isnan().any()), "NaN among the weights: -0 was carried over")
        return values

    def _fp8_block(self, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        need(scale.shape == (weight.shape[0], weight.shape[1] // 128, weight.shape[2] // 128), "block scales")
        return self._fp8(weight) * numbers.expand_blocks(scale)

    def _fp8_rows(self, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        need(scale.shape == (*weight.shape[:2], 1) and scale.is_contiguous(), "one scale per row")
        return self._fp8(weight) * scale

    def _mxfp4(self, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        need(self.arch == "gfx950", "no FP4 multiplier")
        need(weight.dtype == torch.float4_e2m1fn_x2, "packed FP4")
        num_experts, num_rows, num_bytes = weight.shape
        need(scale.dtype == torch.uint8 and scale.numel() % num_experts == 0, "exponent bytes")
        exponents = scale.flatten()[scale_positions(num_experts * num_rows, num_bytes // 16)]
        codes = unshuffle_weight(weight).view(torch.uint8)
        return numbers.mxfp4(codes, exponents.view(num_experts, num_rows, -1))

    def _mxfp4_interleaved(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """[gate; up] from a matrix whose halves alternate every 16 rows (`shuffle_weight_a16w4`, gate_up=True)."""
        num_experts, num_rows, num_bytes = weight.shape
        need(weight.dtype == torch.float4_e2m1fn_x2 and num_rows % 32 == 0 and num_bytes % 128 == 0, "whole tiles")
        need(scale.dtype == torch.uint8 and scale.numel() == num_experts * num_rows * num_bytes // 16, "exponents")
        half, row = torch.arange(2)[:, None, None], torch.arange(num_rows // 2)[:, None]
        byte, col = torch.arange(num_bytes), torch.arange(num_bytes // 16)
        piece = (row // 16 * 2 + half) * (num_bytes // 64) + byte // 64
        codes_at = ((piece * 4 + byte % 64 // 16) * 16 + row % 16) * 16 + byte % 16
        piece = row // 16 * (len(col) // 8) + col // 8
        scales_at = (((piece * 4 + col % 4) * 16 + row % 16) * 2 + col % 8 // 4) * 2 + half
        codes = weight.view(torch.uint8).flatten(1)[:, codes_at.flatten(0, 1)]
        exponents = scale.view(num_experts, -1)[:, scales_at.flatten(0, 1)]
        return numbers.mxfp4(codes, exponents)


def install_aiter(
    monkeypatch: pytest.MonkeyPatch, arch: str = "gfx950", *, wide: bool = False, has_fp4_port: bool = False
) -> Aiter:
    """`import aiter` finds the emulator on a GPU of `arch` until the test ends."""
    emulator = Aiter(arch, wide, has_fp4_port)
    module = SimpleNamespace(QuantType=QuantType, ActivationType=ActivationType)
    monkeypatch.setitem(sys.modules, "aiter", module)
    monkeypatch.setitem(sys.modules, "aiter.fused_moe", SimpleNamespace(fused_moe=emulator.fused_moe))
    pretend_rocm(monkeypatch, arch)
    return emulator
