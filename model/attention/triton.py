"""Attention in Triton on GPUs: a kernel for decodes and one for prompts, which both read the KV pages directly.

Nothing here waits for the device or copies to it, and no grid depends on lengths, so that decode steps can be captured
in CUDA graphs. Latent attention (MLA) has a kernel of its own, for decodes and prompts alike; its prompts are attended
in the absorbed form too, which costs 3.4 times the products of the expanded heads of DeepSeek-V3 but expands nothing.

Shape letters: T tokens, B requests, H query heads, G KV heads, D key dim, V value dim, S parts of a request's keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton

from model.attention.base import BF16, Attention, AttentionDtypes, AttentionSpec, register_attention
from model.attention.latent_kernels import latent_attention, store_latents
from model.attention.tiles import Tile, latent_tile
from model.attention.triton_kernels import LOG2_E, decode, merge_parts, prefill, rotate_and_store
from model.batch import ForwardBatch, LayerKv
from model.norm import RmsNorm
from moe.backends.c_compiler import missing_for_triton
from moe.device import num_processors
from moe.kernels.compile_ahead import launch
from moe.kernels.pdl import pdl_options

_MAX_HEAD_DIM = 128
_MAX_LATENT_DIM = 512
_MAX_ROPE_DIM = 64
_FIRST_WITH_FP8 = (8, 9)  # compute capability


# The fastest of a search on an H200 with GPT-OSS-20B's heads (`benchmarks/results/attention_h200.json`).
_DECODE = Tile(keys=64, warps=2, stages=5)
_PREFILL = Tile(rows=128, keys=128, warps=4, stages=2)
_PREFILL_IN_WINDOW = Tile(rows=128, keys=32, warps=8, stages=2)
# Tokens of one program that rotates and stores: one in small steps, which fills more processors, else several.
_FEW_TOKENS, _ROTATED_TOKENS, _ROTATED_NUMBERS = 64, 4, 4096
_ROTATED_HEADS = 32  # of one program that stores latents
_MIN_PART_KEYS = 64
MAX_PARTS = 32  # of one request's keys; a power of two
# Up to so many are joined by a kernel of their own: skipping most of 32 takes time, too, and where requests have few
# parts there are many of them. Graphs alone launch it, so that no later step finds it not compiled.
_FEW_PARTS = 4


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """The batch as each kind of layer sees it, and which kernels it needs."""

    batches: dict[AttentionSpec, ForwardBatch]
    has_decodes: bool
    has_prompts: bool
    is_for_graph: bool = field(default=False, kw_only=True)


@register_attention
class TritonAttention(Attention):
    """Grouped-query and latent attention with sinks and sliding windows, over a cache of any float type or FP8."""

    name = "triton"
    is_capturable = True

    def __init__(self, specs: Sequence[AttentionSpec], device: torch.device, dtypes: AttentionDtypes = BF16) -> None:
        super().__init__(specs, device, dtypes)
        self._num_processors, self._capability = num_processors(device, 1), (0, 0)
        if device.type == "cuda":  # AMD's GPUs, which torch calls so too, count versions of their own
            self._capability = (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """Very wide heads are left to torch."""
        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            return f"it needs a CUDA device, not {device.type}"
        if reason := _latent_reason(spec) if spec.values_in_keys else _width_reason(spec):
            return reason
        if spec.key_dim % 2:
            return f"it rotates pairs, and a key dim of {spec.key_dim} is odd"
        return None

    @classmethod
    def lacks(cls, device: torch.device) -> str | None:
        """What Triton needs to start a kernel."""
        return missing_for_triton() if device.type == "cuda" else None

    def plan(self, batch: ForwardBatch) -> TritonPlan:
        """Only says which kernels run: they find requests and pages by themselves."""
        return TritonPlan(
            {spec: batch.for_window(spec.window) for spec in self.specs},
            has_decodes=1 in batch.query_lens,
            has_prompts=any(query_len > 1 for query_len in batch.query_lens),
        )

    def plan_for_graph(self, batch: ForwardBatch) -> TritonPlan:
        """Which kernels run. The batch has the longest lengths that a replay may have."""
        return replace(self.plan(batch), is_for_graph=True)

    def run(
        self,
        spec: AttentionSpec,
        plan: TritonPlan,
        kv: LayerKv,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGV: torch.Tensor | None,
        sinks_H: torch.Tensor | None,
        rotation_T1D: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the base class."""
        kv = LayerKv(_bytes_if_fp8(kv.keys), _bytes_if_fp8(kv.values))
        q_THD, k_TGD = _with_dense_heads(q_THD), _with_dense_heads(k_TGD)
        v_TGV = None if v_TGV is None else _with_dense_heads(v_TGV)
        formats = _number_formats(q_THD.dtype, kv.keys.dtype, self._capability)
        _rotate_and_store(spec, kv, plan.batches[spec].slots_T, q_THD, k_TGD, v_TGV, rotation_T1D, formats)
        attend = self._attend_latents if spec.values_in_keys else self._attend
        return attend(spec, plan, kv, q_THD, sinks_H, formats)

    def run_latents(
        self,
        spec: AttentionSpec,
        plan: TritonPlan,
        kv: LayerKv,
        q_THD: torch.Tensor,
        q_pe_THP: torch.Tensor,
        latents_TD: torch.Tensor,
        norm: RmsNorm,
        rotation_T1D: torch.Tensor,
    ) -> torch.Tensor:
        """See the base class: two kernels, or three where keys are attended in parts."""
        kv = LayerKv(_bytes_if_fp8(kv.keys), kv.values)
        formats = _number_formats(q_THD.dtype, kv.keys.dtype, self._capability)
        num_blocks = 1 + triton.cdiv(spec.num_heads, _ROTATED_HEADS)
        launch(store_latents, (q_THD.shape[0], num_blocks))(
            q_pe_THP, q_THD, latents_TD, norm.weight, torch.view_as_real(rotation_T1D), plan.batches[spec].slots_T,
            kv.keys, q_pe_THP.stride(0), q_pe_THP.stride(1), q_THD.stride(0), latents_TD.stride(0), norm.eps,
            NUM_HEADS=spec.num_heads, C=spec.value_dim, P=spec.key_dim - spec.value_dim,
            C_PAD=triton.next_power_of_2(spec.value_dim),
            P_PAD=triton.next_power_of_2(spec.key_dim - spec.value_dim), BLOCK_H=_ROTATED_HEADS,
            IS_FP8=formats["IS_FP8"], USE_CAST=formats["USE_CAST"], num_warps=4, **pdl_options(q_THD.device),
        )  # fmt: skip
        return self._attend_latents(spec, plan, kv, q_THD, None, formats)

    def _attend(
        self, spec: AttentionSpec, plan: TritonPlan, kv: LayerKv, q_THD: torch.Tensor, sinks_H: torch.Tensor | None,
        formats: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        """Each query head with keys and values of its KV head."""
        batch = plan.batches[spec]
        out_THV = q_THD.new_empty(q_THD.shape[0], spec.num_heads, spec.value_dim)
        sinks = out_THV if sinks_H is None else sinks_H
        shape = _shape_of(spec, batch.page_size, has_sinks=sinks_H is not None) | formats
        pointers = (q_THD, kv.keys, kv.values, batch.page_table_BP, batch.query_start_B1, batch.seq_lens_B, sinks)
        strides = (spec.scale * LOG2_E.value, q_THD.stride(0), batch.page_table_BP.stride(0))
        num_requests = len(batch.query_lens)
        if plan.has_decodes:
            num_parts = self.num_parts(spec, num_requests, batch.page_table_BP.shape[1] * batch.page_size, _DECODE)
            parts, stats = _new_parts(out_THV, num_requests, num_parts)
            launch(decode, (num_requests, spec.num_kv_heads, num_parts))(
                *pointers, out_THV, parts, stats, *strides, num_parts,
                BLOCK_N=_DECODE.keys, IS_SPLIT=num_parts > 1,
                **shape | {"R_PAD": max(16, shape["R_PAD"])},  # the least that tl.dot accepts
                num_warps=_DECODE.warps, num_stages=_DECODE.stages, **pdl_options(q_THD.device),
            )  # fmt: skip
            if num_parts > 1:
                _merge_parts(batch, parts, stats, sinks_H, out_THV, is_for_graph=plan.is_for_graph)
        if plan.has_prompts:
            tile = _PREFILL if spec.window is None else _PREFILL_IN_WINDOW
            block_q = max(1, tile.rows // shape["R_PAD"])
            launch(prefill, (q_THD.shape[0] // block_q + num_requests, spec.num_kv_heads))(
                *pointers, out_THV, num_requests, *strides,
                BLOCK_Q=block_q, BLOCK_N=tile.keys, **shape, num_warps=tile.warps, num_stages=tile.stages,
                **pdl_options(q_THD.device),
            )  # fmt: skip
        return out_THV

    def _attend_latents(
        self, spec: AttentionSpec, plan: TritonPlan, kv: LayerKv, q_THD: torch.Tensor, sinks_H: torch.Tensor | None,
        formats: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        """All query heads with one latent per token."""
        batch = plan.batches[spec]
        out_THV = q_THD.new_empty(q_THD.shape[0], spec.num_heads, spec.value_dim)
        constants = _latent_shape_of(spec, batch.page_size, has_sinks=sinks_H is not None) | formats
        constants |= pdl_options(q_THD.device)
        pointers = (
            q_THD, kv.keys, batch.page_table_BP, batch.query_start_B1, batch.seq_lens_B,
            out_THV if sinks_H is None else sinks_H, out_THV,
        )  # fmt: skip
        strides = (spec.scale * LOG2_E.value, q_THD.stride(0), batch.page_table_BP.stride(0))
        num_requests = len(batch.query_lens)
        if plan.has_decodes:
            tile = latent_tile(q_THD.dtype, kv.keys.dtype, self._capability, num_requests * spec.num_heads)
            num_parts = self.num_parts(spec, num_requests, batch.page_table_BP.shape[1] * batch.page_size, tile)
            parts, stats = _new_parts(out_THV, num_requests, num_parts)
            block_h = tile.rows
            launch(latent_attention, (num_requests * triton.cdiv(spec.num_heads, block_h), num_parts))(
                *pointers, parts, stats, *strides, num_requests, num_parts,
                BLOCK_Q=1, BLOCK_H=block_h, IS_DECODE=True, IS_SPLIT=num_parts > 1, **_options(tile), **constants,
            )  # fmt: skip
            if num_parts > 1:
                _merge_parts(batch, parts, stats, sinks_H, out_THV, is_for_graph=plan.is_for_graph)
        if plan.has_prompts:
            tile = latent_tile(q_THD.dtype, kv.keys.dtype, self._capability)
            block_h = min(tile.rows, triton.next_power_of_2(spec.num_heads))
            block_q = tile.rows // block_h
            num_blocks = q_THD.shape[0] // block_q + num_requests
            launch(latent_attention, (num_blocks * triton.cdiv(spec.num_heads, block_h), 1))(
                *pointers, out_THV, out_THV, *strides, num_requests, 1,
                BLOCK_Q=block_q, BLOCK_H=block_h, IS_DECODE=False, IS_SPLIT=False, **_options(tile), **constants,
            )  # fmt: skip
        return out_THV

    def num_parts(self, spec: AttentionSpec, num_requests: int, max_keys: int, tile: Tile) -> int:
        """Parts that each request's keys are cut into, so that few requests still fill the GPU."""
        num_keys = max_keys if spec.window is None else min(spec.window, max_keys)
        num_tiles = triton.cdiv(spec.num_heads, tile.rows) if spec.values_in_keys else spec.num_kv_heads
        wanted = self._num_processors * tile.per_processor // (num_requests * num_tiles)
        return max(1, min(wanted, MAX_PARTS, num_keys // _MIN_PART_KEYS))


def _width_reason(spec: AttentionSpec) -> str | None:
    """None if the heads are narrow enough for `decode` and `prefill`, else what is not."""
    widest = max(spec.key_dim, spec.value_dim)
    return f"it serves head dims up to {_MAX_HEAD_DIM}, not {widest}" if widest > _MAX_HEAD_DIM else None


def _latent_reason(spec: AttentionSpec) -> str | None:
    """None if `latent_attention` can serve the layer, else why not."""
    rope_dim = spec.key_dim - spec.value_dim
    if torch.version.hip:
        return "its tiles of latent attention (MLA) are larger than an AMD GPU's shared memory"
    if spec.num_kv_heads > 1:
        return f"it serves latent attention with one KV head, not {spec.num_kv_heads}"
    if spec.value_dim > _MAX_LATENT_DIM or rope_dim > _MAX_ROPE_DIM:
        return (
            f"it serves latents up to {_MAX_LATENT_DIM} with a rope part up to {_MAX_ROPE_DIM}, not "
            f"{spec.value_dim} with {rope_dim}"
        )
    return None


def _with_dense_heads(x_THD: torch.Tensor) -> torch.Tensor:
    """The same tensor with the heads of a token side by side; the stride between tokens may be anything."""
    is_dense = x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2]
    return x_THD if is_dense else x_THD.contiguous()


def _bytes_if_fp8(cache: torch.Tensor) -> torch.Tensor:
    """An FP8 cache as bytes, since Triton has no FP8 pointers on GPUs without FP8."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def _number_formats(dtype: torch.dtype, kv_dtype: torch.dtype, capability: tuple[int, int]) -> dict[str, Any]:
    """Compile-time constants that say how to multiply, and how to read and write the cache."""
    is_fp8 = kv_dtype == torch.uint8
    return {
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "IS_FP8": is_fp8,
        "USE_CAST": is_fp8 and capability >= _FIRST_WITH_FP8,
    }


def _shape_of(spec: AttentionSpec, page_size: int, *, has_sinks: bool) -> dict[str, Any]:
    """Compile-time constants of `decode` and `prefill`."""
    num_shared = triton.next_power_of_2(spec.num_heads // spec.num_kv_heads)
    return {
        "NUM_HEADS": spec.num_heads, "NUM_KV_HEADS": spec.num_kv_heads, "R_PAD": num_shared,
        "D": spec.key_dim, "V": spec.value_dim,
        "D_PAD": max(16, triton.next_power_of_2(spec.key_dim)),
        "V_PAD": max(16, triton.next_power_of_2(spec.value_dim)),
        "PAGE_SIZE": page_size, "WINDOW": spec.window or 0, "HAS_SINKS": has_sinks,
    }  # fmt: skip


def _latent_shape_of(spec: AttentionSpec, page_size: int, *, has_sinks: bool) -> dict[str, Any]:
    """Compile-time constants of `latent_attention`."""
    rope_dim = spec.key_dim - spec.value_dim
    return {
        "NUM_HEADS": spec.num_heads, "C": spec.value_dim, "P": rope_dim,
        "C_PAD": max(16, triton.next_power_of_2(spec.value_dim)),
        "P_PAD": max(16, triton.next_power_of_2(rope_dim)),
        "PAGE_SIZE": page_size, "WINDOW": spec.window or 0, "HAS_SINKS": has_sinks,
    }  # fmt: skip


def _options(tile: Tile) -> dict[str, int]:
    """What `latent_attention` takes of a tile, besides its rows."""
    return {"BLOCK_N": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages}


def _rotate_and_store(
    spec: AttentionSpec, kv: LayerKv, slots_T: torch.Tensor, q_THD: torch.Tensor, k_TGD: torch.Tensor,
    v_TGV: torch.Tensor | None, rotation_T1D: torch.Tensor | None, formats: dict[str, Any],
) -> None:  # fmt: skip
    num_tokens, num_shared = slots_T.shape[0], spec.num_heads // spec.num_kv_heads
    r_pad, d_pad = triton.next_power_of_2(num_shared), triton.next_power_of_2(spec.key_dim)
    block_t = 1 if num_tokens <= _FEW_TOKENS else max(1, min(_ROTATED_TOKENS, _ROTATED_NUMBERS // (r_pad * d_pad)))
    v, values = (k_TGD, kv.keys) if v_TGV is None else (v_TGV, kv.values)
    launch(rotate_and_store, (triton.cdiv(num_tokens, block_t), spec.num_kv_heads))(
        q_THD, k_TGD, v, q_THD if rotation_T1D is None else torch.view_as_real(rotation_T1D), slots_T,
        kv.keys, values, num_tokens, q_THD.stride(0), k_TGD.stride(0), v.stride(0),
        NUM_KV_HEADS=spec.num_kv_heads, R=num_shared, R_PAD=r_pad, D=spec.key_dim, V=spec.value_dim, D_PAD=d_pad,
        V_PAD=triton.next_power_of_2(spec.value_dim), BLOCK_T=block_t, HAS_ROTATION=rotation_T1D is not None,
        HAS_VALUES=v_TGV is not None, IS_FP8=formats["IS_FP8"], USE_CAST=formats["USE_CAST"], num_warps=4,
        **pdl_options(q_THD.device),
    )  # fmt: skip


def _new_parts(out_THV: torch.Tensor, num_requests: int, num_parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 sums [B, H, S, V] and statistics [B, H, S, 2] of the parts of decodes; two unused tensors if S is 1."""
    if num_parts == 1:
        return out_THV, out_THV
    size = (num_requests, out_THV.shape[1], num_parts)
    parts = torch.empty((*size, out_THV.shape[2]), dtype=torch.float32, device=out_THV.device)
    return parts, torch.empty((*size, 2), dtype=torch.float32, device=out_THV.device)


def _merge_parts(
    batch: ForwardBatch, parts: torch.Tensor, stats: torch.Tensor, sinks_H: torch.Tensor | None, out_THV: torch.Tensor,
    *, is_for_graph: bool,
) -> None:  # fmt: skip
    """Join the parts into the rows of requests with one token."""
    num_requests, num_heads, num_parts, value_dim = parts.shape
    v_pad = triton.next_power_of_2(value_dim)
    most_parts = _FEW_PARTS if is_for_graph and num_parts <= _FEW_PARTS else MAX_PARTS
    launch(merge_parts, (num_requests, num_heads))(
        parts, stats, batch.query_start_B1, out_THV if sinks_H is None else sinks_H, out_THV, num_parts,
        NUM_HEADS=num_heads, V=value_dim, V_PAD=v_pad, S_PAD=most_parts, HAS_SINKS=sinks_H is not None,
        num_warps=max(1, v_pad // 64), **pdl_options(parts.device),
    )  # fmt: skip
