"""`Device`: a device type that need not be on this machine, the architecture names of torch devices, and `as_dtype`."""

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A kind of device. `arch` is "sm80", "sm90", "gfx942", "cpu" and so on."""

    arch: str

    @property
    def is_cuda(self) -> bool:
        """True for NVIDIA GPUs."""
        return self.arch.startswith("sm")


def cuda_arch(device: torch.device) -> str:
    """Architecture of an NVIDIA GPU from its compute capability, such as "sm90"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def rocm_arch(device: torch.device) -> str:
    """Architecture of an AMD GPU, such as "gfx942"."""
    name: str = getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")
    return name.partition(":")[0]


@functools.cache
def num_processors(device: torch.device, otherwise: int) -> int:
    """Multiprocessors of a GPU; `otherwise` for other devices, where an interpreter runs the kernels."""
    if device.type != "cuda":
        return otherwise
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x.to(dtype)`, which takes a CPU as long as a small operator even where nothing is to be done."""
    return x if x.dtype == dtype else x.to(dtype)


def arch_of(device: torch.device) -> str:
    """Architecture of a CPU or GPU of this machine."""
    if device.type != "cuda":
        return device.type
    return rocm_arch(device) if torch.version.hip else cuda_arch(device)
