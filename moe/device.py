"""The device that a path is asked about, and what a torch device is in those words."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Needs no hardware. `arch` is sm80, sm90, gfx942, cpu and the like."""

    arch: str

    @property
    def is_cuda(self) -> bool:
        """True for NVIDIA GPUs."""
        return self.arch.startswith("sm")


def cuda_arch(device: torch.device) -> str:
    """Of an NVIDIA GPU, by its compute capability: "sm90"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def rocm_arch(device: torch.device) -> str:
    """Of an AMD GPU: "gfx942"."""
    name: str = getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")
    return name.partition(":")[0]


def arch_of(device: torch.device) -> str:
    """Of a CPU or a GPU of this machine."""
    if device.type != "cuda":
        return device.type
    return rocm_arch(device) if torch.version.hip else cuda_arch(device)
