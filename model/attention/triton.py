"""Attention in Triton on GPUs: a kernel for decodes and one for prompts, which both read the KV pages directly.

Nothing here waits for the device or copies to it, and no grid depends on lengths, so that decode steps can be captured
in CUDA graphs. Latent attention (MLA) is not served yet.

Shape letters: T tokens, B requests, H query heads, G KV heads, D key dim, V value dim, S parts of a request's keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from model.attention.base import Attention, AttentionSpec, register_attention
from model.attention.triton_kernels import LOG2_E, decode, merge_parts, prefill, rotate_and_store
from model.batch import ForwardBatch, LayerKv
from model.config import UnsupportedModelError
from moe.backends.c_compiler import missing_for_triton

_MAX_HEAD_DIM = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Tile of one program: `rows` is queries times heads, `keys` the keys per iteration of its loop."""

    rows: int = 0
    keys: int
    warps: int
    stages: int


# The fastest of a search on an H200 with GPT-OSS-20B's heads (`benchmarks/results/attention_h200.json`).
_DECODE = Tile(keys=64, warps=2, stages=5)
_PREFILL = Tile(rows=128, keys=64, warps=4, stages=3)
_PREFILL_IN_WINDOW = Tile(rows=128, keys=32, warps=4, stages=4)
_PROGRAMS_PER_PROCESSOR = 2
_MAX_PARTS = 32
_MIN_PART_KEYS = 64


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """The batch, and which kernels it needs."""

    batch: ForwardBatch
    has_decodes: bool
    has_prompts: bool


@register_attention
class TritonAttention(Attention):
    """Grouped-query attention with sinks and sliding windows."""

    name = "triton"
    is_capturable = True

    def __init__(self, specs: Sequence[AttentionSpec], device: torch.device) -> None:
        super().__init__(specs, device)
        self._num_processors = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        )

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """Latent attention, very wide heads and machines without a C compiler are left to torch."""
        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            return f"it needs a CUDA device, not {device.type}"
        if spec.values_in_keys:
            return "it does not serve latent attention (MLA)"
        if max(spec.key_dim, spec.value_dim) > _MAX_HEAD_DIM:
            return f"it serves head dims up to {_MAX_HEAD_DIM}, not {max(spec.key_dim, spec.value_dim)}"
        if spec.key_dim % 2:
            return f"it rotates pairs, and a key dim of {spec.key_dim} is odd"
        lack = missing_for_triton() if device.type == "cuda" else None
        return f"it needs {lack}" if lack else None

    def plan(self, batch: ForwardBatch) -> TritonPlan:
        """Only says which kernels run: they find requests and pages by themselves."""
        return TritonPlan(
            batch,
            has_decodes=1 in batch.query_lens,
            has_prompts=any(query_len > 1 for query_len in batch.query_lens),
        )

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
        if v_TGV is None:
            raise UnsupportedModelError("attention backend triton needs values: it does not serve latent attention")
        batch = plan.batch
        q_THD, k_TGD, v_TGV = (_with_dense_heads(x) for x in (q_THD, k_TGD, v_TGV))
        _rotate_and_store(spec, kv, batch.slots_T, q_THD, k_TGD, v_TGV, rotation_T1D)
        out_THV = q_THD.new_empty(q_THD.shape[0], spec.num_heads, spec.value_dim)
        sinks = out_THV if sinks_H is None else sinks_H
        shape = _shape_of(spec, batch.page_size, q_THD.dtype, has_sinks=sinks_H is not None)
        pointers = (q_THD, kv.keys, kv.values, batch.page_table_BP, batch.query_start_B1, batch.seq_lens_B, sinks)
        strides = (spec.scale * LOG2_E.value, q_THD.stride(0), batch.page_table_BP.stride(0))
        num_requests = len(batch.query_lens)
        if plan.has_decodes:
            num_parts = self.num_parts(spec, num_requests, batch.page_table_BP.shape[1] * batch.page_size)
            _decode(spec, pointers, strides, shape, out_THV, num_requests, num_parts)
        if plan.has_prompts:
            tile = _PREFILL if spec.window is None else _PREFILL_IN_WINDOW
            block_q = max(1, tile.rows // shape["R_PAD"])
            prefill[(q_THD.shape[0] // block_q + num_requests, spec.num_kv_heads)](
                *pointers, out_THV, num_requests, *strides,
                BLOCK_Q=block_q, BLOCK_N=tile.keys, **shape, num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        return out_THV

    def num_parts(self, spec: AttentionSpec, num_requests: int, max_keys: int) -> int:
        """Parts that each request's keys are cut into, so that few requests still fill the GPU."""
        num_keys = max_keys if spec.window is None else min(spec.window, max_keys)
        wanted = self._num_processors * _PROGRAMS_PER_PROCESSOR // (num_requests * spec.num_kv_heads)
        return max(1, min(wanted, _MAX_PARTS, num_keys // _MIN_PART_KEYS))


def _with_dense_heads(x_THD: torch.Tensor) -> torch.Tensor:
    """The same tensor with the heads of a token side by side; the stride between tokens may be anything."""
    is_dense = x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2]
    return x_THD if is_dense else x_THD.contiguous()


def _shape_of(spec: AttentionSpec, page_size: int, dtype: torch.dtype, *, has_sinks: bool) -> dict[str, Any]:
    """Compile-time constants of both kernels."""
    num_shared = triton.next_power_of_2(spec.num_heads // spec.num_kv_heads)
    return {
        "NUM_HEADS": spec.num_heads, "NUM_KV_HEADS": spec.num_kv_heads, "R_PAD": num_shared,
        "D": spec.key_dim, "V": spec.value_dim,
        "D_PAD": max(16, triton.next_power_of_2(spec.key_dim)),
        "V_PAD": max(16, triton.next_power_of_2(spec.value_dim)),
        "PAGE_SIZE": page_size, "WINDOW": spec.window or 0, "HAS_SINKS": has_sinks,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }  # fmt: skip


def _rotate_and_store(
    spec: AttentionSpec, kv: LayerKv, slots_T: torch.Tensor, q_THD: torch.Tensor, k_TGD: torch.Tensor,
    v_TGV: torch.Tensor, rotation_T1D: torch.Tensor | None,
) -> None:  # fmt: skip
    num_shared = spec.num_heads // spec.num_kv_heads
    rotate_and_store[(slots_T.shape[0], spec.num_kv_heads)](
        q_THD, k_TGD, v_TGV, q_THD if rotation_T1D is None else torch.view_as_real(rotation_T1D), slots_T,
        kv.keys, kv.values, q_THD.stride(0), k_TGD.stride(0), v_TGV.stride(0),
        NUM_KV_HEADS=spec.num_kv_heads, R=num_shared, R_PAD=triton.next_power_of_2(num_shared),
        D=spec.key_dim, V=spec.value_dim, PAIRS_PAD=triton.next_power_of_2(spec.key_dim) // 2,
        V_PAD=triton.next_power_of_2(spec.value_dim), HAS_ROTATION=rotation_T1D is not None, num_warps=4,
    )  # fmt: skip


def _decode(
    spec: AttentionSpec, pointers: tuple[torch.Tensor, ...], strides: tuple[float, int, int], shape: dict[str, Any],
    out_THV: torch.Tensor, num_requests: int, num_parts: int,
) -> None:  # fmt: skip
    shape = shape | {"R_PAD": max(16, shape["R_PAD"])}  # the least that tl.dot accepts
    parts = stats = out_THV
    if num_parts > 1:
        size = (num_requests, spec.num_heads, num_parts)
        parts = torch.empty((*size, spec.value_dim), dtype=torch.float32, device=out_THV.device)
        stats = torch.empty((*size, 2), dtype=torch.float32, device=out_THV.device)
    decode[(num_requests, spec.num_kv_heads, num_parts)](
        *pointers, out_THV, parts, stats, *strides, num_parts,
        BLOCK_N=_DECODE.keys, IS_SPLIT=num_parts > 1, **shape, num_warps=_DECODE.warps, num_stages=_DECODE.stages,
    )  # fmt: skip
    if num_parts > 1:
        merge_parts[(num_requests, spec.num_heads)](
            parts, stats, pointers[4], pointers[6], out_THV, num_parts,
            NUM_HEADS=spec.num_heads, V=spec.value_dim, V_PAD=shape["V_PAD"],
            S_PAD=_MAX_PARTS, HAS_SINKS=shape["HAS_SINKS"], num_warps=1,
        )  # fmt: skip
