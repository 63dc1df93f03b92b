"""Rows of expert weights in the order the TRT-LLM kernels of FlashInfer read them, by the library's own helpers.

Used by the SM100 forms of several backends. Input halves are [up; gate]; every function works expert by expert,
because the helpers take one matrix.
"""

from collections.abc import Callable

import torch

from moe.backends.flashinfer.common import library
from moe.routing import StandardTopK

EPILOGUE_TILE_M = 128


def _each(tensor: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return torch.stack([convert(tensor[expert]) for expert in range(tensor.shape[0])])


def shuffled(rows_EMC: torch.Tensor, *, gated: bool) -> torch.Tensor:
    """[E, M, C] bytes with rows reordered for the kernel's epilogue; `gated` first alternates up and gate rows."""
    flashinfer = library()

    def convert(rows_MC: torch.Tensor) -> torch.Tensor:
        if gated:
            rows_MC = flashinfer.reorder_rows_for_gated_act_gemm(rows_MC)
        return flashinfer.shuffle_matrix_a(rows_MC, EPILOGUE_TILE_M)

    return _each(rows_EMC, convert)


def shuffled_scales(scales_EMS: torch.Tensor, *, gated: bool, group: int) -> torch.Tensor:
    """[E, M, S] scale bytes: rows as `shuffled`, then the 128x4 swizzle; seen as e4m3, the kernel's name for bytes."""
    flashinfer = library()

    def convert(scales_MS: torch.Tensor) -> torch.Tensor:
        if gated:
            scales_MS = flashinfer.reorder_rows_for_gated_act_gemm(scales_MS)
        flat = flashinfer.shuffle_matrix_sf_a(scales_MS, EPILOGUE_TILE_M, num_elts_per_sf=group)
        return flat.reshape(scales_MS.shape)

    return _each(scales_EMS.view(torch.uint8), convert).view(torch.float8_e4m3fn)


def pack_topk(topk: StandardTopK) -> torch.Tensor:
    """int32 [T, K] of `id << 16 | bf16 bits of the weight`. A slot without an expert becomes expert 0 with weight 0."""
    is_used = topk.ids >= 0
    weight_bits = torch.where(is_used, topk.weights, 0.0).to(torch.bfloat16).view(torch.int16).to(torch.int32)
    return (torch.where(is_used, topk.ids, 0).to(torch.int32) << 16) | (weight_bits & 0xFFFF)
