"""aiter's `fused_moe`: checks what the kernel relies on, undoes the shuffles by their byte maps, computes in fp32.

Ids live in the space of the expert mask; an id outside it, -1 included, is refused. Rows past `num_local_tokens` come
back as NaN. `wide` returns fp32 instead of bf16, so that a test compares arithmetic alone.
"""

import enum
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.emulators import numbers
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


def weight_positions(num_rows: int, num_bytes: int, element_size: int = 1) -> torch.Tensor:
    """[rows, bytes] flat position of every byte: tiles of 16 rows and 32 elements, pieces of 16 bytes."""
    row, byte = torch.arange(num_rows)[:, None], torch.arange(num_bytes)
    width = 32 * element_size
    tile = row // 16 * 16 * num_bytes + byte // width * 16 * width
    return tile + byte % width // 16 * 256 + row % 16 * 16 + byte % 16


def scale_positions(num_rows: int, num_cols: int) -> torch.Tensor:
    """[rows, cols] flat position of every exponent of a matrix padded to multiples of (256, 8)."""
    row, col = torch.arange(num_rows)[:, None], torch.arange(num_cols)
    cols = (num_cols + 7) // 8 * 8
    block = (row // 32 * (cols // 8) + col // 8) * 256
    return block + col % 4 * 64 + row % 16 * 4 + col % 8 // 4 * 2 + row % 32 // 16


def unshuffle_weight(weight: torch.Tensor) -> torch.Tensor:
    """[E, N, K] back to row-major, in the same dtype."""
    octets = weight.view(torch.uint8)
    num_rows, num_bytes = octets.shape[1:]
    element_size = 2 if weight.dtype == torch.bfloat16 else 1
    flat = octets.flatten(1)[:, weight_positions(num_rows, num_bytes, element_size)]
    return flat.contiguous().view(weight.dtype)


def fp8_values(codes: torch.Tensor) -> torch.Tensor:
    values = codes.float()
    need(not bool(values.isnan().any()), "NaN among the weights: -0 was carried over")
    return values


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


@dataclass
class Aiter:
    """`calls` keeps every launch, `exact` the last result in fp32."""

    arch: str
    wide: bool
    calls: list[SimpleNamespace] = field(default_factory=list)
    exact: torch.Tensor | None = None

    def fused_moe(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weight: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_mask: torch.Tensor | None = None,
        activation: ActivationType = ActivationType.Silu,
        quant_type: QuantType = QuantType.No,
        doweight_stage1: bool = False,
        w1_scale: torch.Tensor | None = None,
        w2_scale: torch.Tensor | None = None,
        a1_scale: torch.Tensor | None = None,
        a2_scale: torch.Tensor | None = None,
        block_size_M: int | None = None,
        num_local_tokens: torch.Tensor | None = None,
        moe_sorting_dispatch_policy: int = 0,
        dtype: torch.dtype | None = None,
        hidden_pad: int = 0,
        intermediate_pad: int = 0,
        bias1: torch.Tensor | None = None,
        bias2: torch.Tensor | None = None,
        splitk: int = 0,
    ) -> torch.Tensor:
        call = SimpleNamespace(**{name: value for name, value in locals().items() if name != "self"})
        self.calls.append(call)
        num_rows = hidden_states.shape[0]
        num_real = num_rows if num_local_tokens is None else int(num_local_tokens)
        need(num_rows > 0, "no rows: the kernel has no guard")
        need(0 <= num_real <= num_rows, "num_local_tokens exceeds the rows")
        need(dtype == torch.bfloat16 and activation is ActivationType.Silu, "dtype or activation")
        need(expert_mask is not None and expert_mask.dtype == torch.int32, "expert_mask must be int32")
        need(topk_ids.dtype == torch.int32 and topk_ids.shape[0] == num_rows, "topk_ids must be int32 [R, K]")
        need(topk_weight.dtype == torch.float32 and topk_weight.shape == topk_ids.shape, "weights are fp32 [R, K]")
        assert expert_mask is not None
        need(int(expert_mask.sum()) == w1.shape[0], "the mask must count the experts that are here")
        ids = topk_ids[:num_real]
        need(bool(((ids >= 0) & (ids < expert_mask.numel())).all()), "an id outside the mask")
        local = torch.where(expert_mask.bool(), torch.cumsum(expert_mask, 0) - 1, -1)[ids.long()]
        x = self._tokens(call)[:num_real]
        result = torch.full((num_rows, w2.shape[1]), float("nan"))
        result[:num_real] = self._experts(call).run(x, local, topk_weight[:num_real])
        self.exact = result
        return result if self.wide else result.bfloat16()

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
        decode = {
            QuantType.No: self._bf16, QuantType.per_128x128: self._fp8_block,
            QuantType.per_Token: self._fp8_rows, QuantType.per_1x32: self._mxfp4,
        }[call.quant_type]  # fmt: skip
        dense = [decode(w, s) for w, s in ((call.w1, call.w1_scale), (call.w2, call.w2_scale))]
        need(dense[0].shape[1] == 2 * dense[1].shape[2] and dense[0].shape[2] == dense[1].shape[1], "weight shapes")
        round_one: Any = {
            QuantType.No: None, QuantType.per_128x128: numbers.fake_fp8_groups,
            QuantType.per_Token: per_token_fp8, QuantType.per_1x32: even_mxfp4,
        }[call.quant_type]  # fmt: skip
        experts = DenseExperts(w13=dense[0], w2=dense[1], first_is_up=False)
        if round_one is not None:
            experts.quantize_mid = lambda mid, expert: round_one(mid)
            if call.hidden_states.dtype == torch.bfloat16:
                experts.quantize_in = lambda x, expert: round_one(x)
        return experts

    def _bf16(self, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        need(weight.dtype == torch.bfloat16 and scale is None, "bf16 weights without scales")
        return unshuffle_weight(weight).float()

    def _fp8(self, weight: torch.Tensor) -> torch.Tensor:
        need(weight.dtype == (FNUZ if self.arch == "gfx942" else FN), "FP8 variant of this GPU")
        return fp8_values(unshuffle_weight(weight))

    def _fp8_block(self, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        assert scale is not None
        need(scale.shape == (weight.shape[0], weight.shape[1] // 128, weight.shape[2] // 128), "block scales")
        return self._fp8(weight) * numbers.expand_blocks(scale)

    def _fp8_rows(self, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        assert scale is not None
        need(scale.shape == (*weight.shape[:2], 1) and scale.is_contiguous(), "one scale per row")
        return self._fp8(weight) * scale

    def _mxfp4(self, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        assert scale is not None
        need(self.arch == "gfx950", "no FP4 multiplier")
        need(weight.dtype == torch.float4_e2m1fn_x2, "packed FP4")
        num_experts, num_rows, num_bytes = weight.shape
        need(scale.dtype == torch.uint8 and scale.numel() % num_experts == 0, "exponent bytes")
        exponents = scale.flatten()[scale_positions(num_experts * num_rows, num_bytes // 16)]
        codes = unshuffle_weight(weight).view(torch.uint8)
        return numbers.mxfp4(codes, exponents.view(num_experts, num_rows, -1))


def install_aiter(monkeypatch: pytest.MonkeyPatch, arch: str = "gfx950", *, wide: bool = False) -> Aiter:
    """`import aiter` finds the emulator on a GPU of `arch` until the test ends."""
    emulator = Aiter(arch, wide)
    module = SimpleNamespace(QuantType=QuantType, ActivationType=ActivationType)
    monkeypatch.setitem(sys.modules, "aiter", module)
    monkeypatch.setitem(sys.modules, "aiter.fused_moe", SimpleNamespace(fused_moe=emulator.fused_moe))
    properties = SimpleNamespace(gcnArchName=f"{arch}:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    return emulator
