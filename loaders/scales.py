"""Scales of quantized weights: read, converted to the dtype of the canonical weight, and refused where they are wrong.

A NaN, infinite, zero or negative scale turns a layer into NaN or noise, and the self-check compares only some layers.
So every scale is checked when it is read, and the error names its tensor.
"""

import torch

from loaders.errors import CheckpointError
from loaders.source import TensorMeta, TensorSource
from moe.formats.mxfp4 import e8m0_to_float

_E4M3_LARGEST = 0x7E  # the byte of 448; 0x7F is NaN, and negative numbers follow
_E8M0_NAN = 0xFF


def read_scalar(source: TensorSource, name: str) -> torch.Tensor:
    """A per-tensor scale, stored as [] or [1], as fp32 [].

    Raises:
        CheckpointError: missing, or not a finite number above 0.
    """
    value = source.tensor(name).float().reshape(())
    _check_positive(value, source.meta(name))
    return value


def float_scales(values: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Block scales in any accepted dtype to fp32.

    Raises:
        CheckpointError: one is not a finite number above 0.
    """
    scales = e8m0_to_float(values.view(torch.uint8)) if values.dtype == torch.float8_e8m0fnu else values.float()
    _check_positive(scales, meta)
    return scales


def e4m3_scales(values: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """NVFP4 block scales, unchanged; 0 stands for a block of zeros.

    Raises:
        CheckpointError: one is NaN or negative.
    """
    if values.numel() and int(values.view(torch.uint8).amax()) > _E4M3_LARGEST:
        floats = values.float()
        bad = floats[~(floats >= 0) | torch.signbit(floats)][0].item()
        raise CheckpointError(f"{meta.where}: a block scale must be 0 or above, found {bad}; the file is damaged")
    return values


def e8m0_scales(values: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """MXFP4 scales as exponent bytes: e8m0 and u8 unchanged, fp32 if every value is a power of two.

    Raises:
        CheckpointError: byte 255, which is NaN, or an fp32 scale that is not a power of two between 2^-127 and 2^127.
    """
    if values.dtype != torch.float32:
        exponents = values.view(torch.uint8)
        if exponents.numel() and int(exponents.amax()) == _E8M0_NAN:
            raise CheckpointError(f"{meta.where}: an E8M0 scale is 255, which stands for NaN; the file is damaged")
        return exponents
    bits = values.contiguous().view(torch.int32)
    exponents, mantissas = bits >> 23, bits & 0x7FFFFF
    smallest = bits == 0x400000  # 2^-127 is a subnormal in fp32, and byte 0 in E8M0
    exact = ((mantissas == 0) & (exponents > 0) & (exponents < 255)) | smallest
    if not bool(exact.all()):
        bad = values[~exact][0].item()
        raise CheckpointError(f"{meta.where}: MXFP4 scales must be powers of two, found {bad}")
    return exponents.to(torch.uint8)


def _check_positive(scales: torch.Tensor, meta: TensorMeta) -> None:
    is_good = torch.isfinite(scales) & (scales > 0)
    if not bool(is_good.all()):
        bad = scales[~is_good].flatten()[0].item()
        raise CheckpointError(
            f"{meta.where}: a scale must be a finite number above 0, found {bad}; the file is damaged, or its export "
            "went wrong"
        )
