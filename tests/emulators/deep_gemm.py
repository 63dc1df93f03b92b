"""The package `deep_gemm`: masked and contiguous grouped FP8 GEMMs, with the checks of its kernels, in fp32.

The library: deepseek-ai/DeepGEMM at commit 54e2261 (2026-06-23), csrc/apis/gemm.hpp and csrc/utils/layout.hpp.
SM90 reads fp32 scales, SM100 four exponent bytes per int32. `wide` lets results be fp32 instead of bf16, so that a test
compares arithmetic alone.
"""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.emulators import numbers
from tests.emulators.refusal import need

E4M3 = torch.float8_e4m3fn
Pair = tuple[torch.Tensor, torch.Tensor]
NAMES_NOW = ("m_grouped_fp8_gemm_nt_masked", "m_grouped_fp8_gemm_nt_contiguous")
NAMES_BEFORE = ("fp8_m_grouped_gemm_nt_masked", "m_grouped_fp8_gemm_nt_contiguous")
NAMES_FIRST = ("m_grouped_gemm_fp8_fp8_bf16_nt_masked", "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous")


class DeepGemm:
    def __init__(self, arch: str, *, wide: bool) -> None:
        self.is_sm100, self.wide = arch == "sm100", wide
        self.calls: list[str] = []

    def masked(self, a: Pair, b: Pair, d: torch.Tensor, masked_m: torch.Tensor, expected_m: int) -> None:
        self.calls.append("masked")
        num_experts, num_rows, _ = a[0].shape
        need(masked_m.dtype == torch.int32 and masked_m.shape == (num_experts,), "masked_m is int32 [E]")
        need(isinstance(expected_m, int) and expected_m > 0, "expected_m is a positive int")
        need(num_rows % 4 == 0, "rows per expert")
        self._check_result(d, (num_experts, num_rows, b[0].shape[1]))
        x, weight = self._tokens(a), self._weights(b)
        d.fill_(float("nan"))
        for expert, count in enumerate(masked_m.tolist()):
            need(0 <= count <= num_rows, "count exceeds the rows")
            d[expert, :count] = (x[expert, :count] @ weight[expert].T).to(d.dtype)

    def contiguous(self, a: Pair, b: Pair, d: torch.Tensor, m_indices: torch.Tensor) -> None:
        self.calls.append("contiguous")
        num_rows = a[0].shape[0]
        need(m_indices.dtype == torch.int32 and m_indices.shape == (num_rows,), "m_indices is int32 [rows]")
        need(num_rows % 128 == 0 and num_rows > 0, "segments of 128 rows")
        segments = m_indices.view(-1, 128)
        need(bool((segments == segments[:, :1]).all()), "all rows of a segment carry one expert id, padding included")
        need(bool((segments[1:, 0] >= segments[:-1, 0]).all()), "experts in order")
        self._check_result(d, (num_rows, b[0].shape[1]))
        x, weight = self._tokens(a), self._weights(b)
        for first, expert in zip(range(0, num_rows, 128), segments[:, 0].tolist(), strict=True):
            d[first : first + 128] = (x[first : first + 128] @ weight[expert].T).to(d.dtype)

    def _check_result(self, d: torch.Tensor, shape: tuple[int, ...]) -> None:
        need(tuple(d.shape) == shape and d.is_contiguous(), f"d is {tuple(d.shape)}, not {shape}")
        need(d.dtype == torch.bfloat16 or (self.wide and d.dtype == torch.float32), "d must be bf16")

    def _tokens(self, a: Pair) -> torch.Tensor:
        codes, scales = a
        need(codes.dtype == E4M3 and codes.is_contiguous() and codes.shape[-1] % 128 == 0, "a: contiguous e4m3")
        return codes.float() * self._row_scales(scales, codes)

    def _weights(self, b: Pair) -> torch.Tensor:
        codes, scales = b
        if not self.is_sm100:
            return numbers.fp8_block(codes, scales)
        need(codes.dtype == E4M3 and codes.is_contiguous(), "b: contiguous e4m3")
        need(codes.shape[1] % 128 == 0 and codes.shape[2] % 128 == 0, "whole blocks")
        return codes.float() * self._row_scales(scales, codes)

    def _row_scales(self, scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """One factor per element, from a scale per row and 128 columns."""
        num_groups = codes.shape[-1] // 128
        columns = -(-num_groups // 4) if self.is_sm100 else num_groups
        need(scales.shape == (*codes.shape[:-1], columns), f"scales are {tuple(scales.shape)}")
        need(scales.stride(-2) == 1 or scales.shape[-2] == 1, "scales must be M-major")
        pitch = (scales.shape[-2] + 3) // 4 * 4
        need(scales.stride(-1) == pitch, "columns of scales lie 16 bytes apart, or the next multiple of it")
        need(scales.dim() == 2 or scales.stride(-3) == pitch * scales.shape[-1], "a gap between experts' scales")
        if not self.is_sm100:
            need(scales.dtype == torch.float32, "SM90 reads fp32 scales")
            return scales.repeat_interleave(128, -1)
        need(scales.dtype == torch.int32, "SM100 reads packed exponents")
        octets = [(scales >> (8 * byte)) & 255 for byte in range(4)]
        exponents = torch.stack(octets, dim=-1).flatten(-2)[..., :num_groups]
        return torch.exp2(exponents.float() - 127).repeat_interleave(128, -1)


def install_deep_gemm(
    monkeypatch: pytest.MonkeyPatch, arch: str = "sm90", *, names: tuple[str, str] = NAMES_NOW, wide: bool = False
) -> DeepGemm:
    """`import deep_gemm` finds the emulator on a device of `arch` until the test ends."""
    emulator = DeepGemm(arch, wide=wide)
    functions: dict[str, Any] = dict(zip(names, (emulator.masked, emulator.contiguous), strict=True))
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(**functions))
    capability = (int(arch[2:-1]), int(arch[-1]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    return emulator
