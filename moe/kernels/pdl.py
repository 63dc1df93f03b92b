"""Programmatic dependent launch (PDL): a kernel starts while the one before it still runs, which hides its launch.

Every kernel launched so must call `gdc_wait` before it reads what an earlier kernel wrote, and before it writes: the
wait ends when the kernel before is complete. What never changes, such as weights, may be read before the wait.
"""

import functools
from typing import Any

import torch
import triton

_OLDEST_MAJOR = 9  # of the compute capability


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Arguments for a kernel with a constant USE_PDL: with PDL on NVIDIA GPUs that have it, else without."""
    return {"USE_PDL": True, "launch_pdl": True} if _has_pdl(device) else {"USE_PDL": False}


@functools.cache
def _has_pdl(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device)[0] >= _OLDEST_MAJOR
