"""Rounding to E2M1 and gradients through it, shared by the families' number formats."""

from __future__ import annotations

import torch
from torch import Tensor


def round_e2m1(x: Tensor) -> Tensor:
    """The nearest E2M1 value, ties to the even code, magnitudes above 6 become 6."""
    size = x.abs().clamp(max=6.0)
    # Between 2**k and 2**(k+1) the values are 2**(k-1) apart; torch.round takes ties to even, as E2M1 needs.
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(size / step) * step, x)


def through(x: Tensor, rounded: Tensor) -> Tensor:
    """Forward: the rounded values. Backward: as if nothing was rounded."""
    return x + (rounded - x).detach()
