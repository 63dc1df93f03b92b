"""In which number format a transport sends tokens for a backend: one pure function. Sends nothing itself."""

import enum
from collections.abc import Callable

import torch

from moe.config import DispatchFormat, MoeBackend
from moe.errors import UnsupportedPathError

Quantize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # [T, H] to codes [T, H/2], scales [T, H/16]


class DispatchDtype(enum.StrEnum):
    """Number format of dispatched tokens."""

    BF16 = "bf16"
    FP8 = "fp8"  # e4m3 with an fp32 scale per 128 columns
    FP8_UE8M0 = "fp8_ue8m0"  # the same with scales rounded up to powers of two
    NVFP4 = "nvfp4"  # packed E2M1, e4m3 scales per 16, under the layer's global scale

    @property
    def is_fp8(self) -> bool:
        """True for both FP8 payloads."""
        return self in (DispatchDtype.FP8, DispatchDtype.FP8_UE8M0)


def choose_dispatch_dtype(
    backend: MoeBackend,
    dispatch_format: DispatchFormat,
    format_name: str,
    *,
    ue8m0_scales: bool = False,
    knows_input_scale: bool = False,
    can_send_nvfp4: bool = False,
) -> DispatchDtype:
    """What the runner's kernels take; anything that they would only convert back travels as bf16.

    `ue8m0_scales`: the kernels want power-of-two scales (DeepGEMM on SM100). `knows_input_scale`: the checkpoint gives
    the static NVFP4 scale. `can_send_nvfp4`: the installed library has the option.

    Raises:
        UnsupportedPathError: power-of-two scales are asked for a path that does not send FP8 to DeepGEMM.
    """
    if ue8m0_scales and backend is not MoeBackend.DEEP_GEMM:
        raise UnsupportedPathError(f"--moe-backend {backend} does not read power-of-two scales; only deep_gemm does")
    if dispatch_format is DispatchFormat.STANDARD:
        return DispatchDtype.BF16
    if backend is MoeBackend.DEEP_GEMM:
        return DispatchDtype.FP8_UE8M0 if ue8m0_scales else DispatchDtype.FP8
    if backend is MoeBackend.FLASHINFER_CUTEDSL and format_name == "nvfp4":
        sends_nvfp4 = can_send_nvfp4 and knows_input_scale and dispatch_format is not DispatchFormat.DEEPEP_NORMAL
        return DispatchDtype.NVFP4 if sends_nvfp4 else DispatchDtype.BF16
    is_mori = dispatch_format in (DispatchFormat.MORI_NORMAL, DispatchFormat.MORI_LL)
    if backend is MoeBackend.AITER and is_mori and format_name == "fp8_block":
        return DispatchDtype.FP8  # the same groups of 128 that its GEMM reads
    return DispatchDtype.BF16


def expert_alignment(backend: MoeBackend) -> int:
    """Multiple to which DeepEP's normal mode rounds the rows of an expert."""
    return 128 if backend is MoeBackend.DEEP_GEMM else 1


def row_multiple(backend: MoeBackend) -> int:
    """What the rows per expert of low latency (ranks times token limit) must be a multiple of."""
    return 128 if backend is MoeBackend.FLASHINFER_CUTEDSL else 4  # its scales come in tiles of 128 rows; FP8's pitch
