"""Shared by the FlashInfer backends: import on first use, version check, device architecture, argument detection.

Nothing here runs at import. Without FlashInfer the backends still register, answer `supports()` and can be explained.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import torch

from moe.backend import Backend, FormatSupport, Info
from moe.config import Activation, MoeBackend
from moe.errors import UnsupportedPathError
from moe.formats import ExpertWeights, activation_quant
from moe.layouts.static_scales import with_layer_input_scales
from moe.packages import not_installed
from moe.topology import Topology
from moe.types import DispatchOutput, StandardDispatchOutput

Version = tuple[int, int, int]
OLDEST: Version = (0, 6, 8)  # the oldest release whose flags were read; every path needs at least this


def parse_version(text: str) -> Version:
    """'0.7.2.post1' to (0, 7, 2); missing parts count as 0."""
    numbers = [int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3]]
    major, minor, patch = (*numbers, 0, 0, 0)[:3]
    return major, minor, patch


def flashinfer_version() -> Version | None:
    """Installed release, or None when the package is missing. Reads metadata only."""
    try:
        return parse_version(importlib.metadata.version("flashinfer-python"))
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_release(wanted: Version) -> str | None:
    """None if this release or a newer one is installed, else what is needed, worded to follow "... needs"."""
    installed = flashinfer_version()
    if installed is None:
        return not_installed("flashinfer")
    if installed >= wanted:
        return None
    least, found = (".".join(map(str, version)) for version in (wanted, installed))
    return f"flashinfer-python {least} or newer and found {found}: pip install 'flashinfer-python>={least}'"


def library(submodule: str = "") -> ModuleType:
    """`flashinfer` or `flashinfer.<submodule>`, imported on first use, after `missing_package`."""
    return importlib.import_module(f"flashinfer.{submodule}" if submodule else "flashinfer")


def standard_tokens(dispatched: DispatchOutput, backend: MoeBackend) -> StandardDispatchOutput:
    """The record itself. Raises UnsupportedPathError for tokens in another layout."""
    if not isinstance(dispatched, StandardDispatchOutput):
        raise UnsupportedPathError(f"{backend} takes the standard dispatch format, got {dispatched.format}")
    return dispatched


def device_arch(device: torch.device) -> str:
    """Compute capability such as 'sm90', from the library's own function."""
    major, minor = library("utils").get_compute_capability(device)
    return f"sm{major}{minor}"


def tuning_context(cache_file: Path | None, *, measure: bool) -> AbstractContextManager[object]:
    """FlashInfer's `LibraryTuning`. A release without a cache file keeps tactics for this process only."""
    autotune = library().autotune
    keeps = cache_file is not None and takes(autotune, "cache")
    context: AbstractContextManager[object] = autotune(measure, **({"cache": str(cache_file)} if keeps else {}))
    return context


def takes(function: Callable[..., object], parameter: str) -> bool:
    """Whether `function` of the installed release has this parameter."""
    return parameter in _parameters(function)


@functools.lru_cache
def _parameters(function: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


# Tolerances of static FP8 and NVFP4: their steps are coarse, so a last-bit difference before the second quantizer moves
# some activations by a whole step, and the kernels divide by approximate reciprocals.
FP8_BLOCK = FormatSupport(activation_quant=activation_quant.fp8_groups, tolerance=6e-2)
FP8_TENSOR = FormatSupport(activation_quant=activation_quant.fp8_static, tolerance=6e-2)
NVFP4 = FormatSupport(activation_quant=activation_quant.nvfp4_static, tolerance=1.5e-1)


class FlashinferBackend(Backend[Info]):
    """A backend whose kernels have bf16 inputs and outputs; static activation scales are the same for the whole layer.

    `minimum_version`: the oldest supported release.
    """

    package = "flashinfer"
    minimum_version: ClassVar[Version] = OLDEST

    def missing_package(self) -> str | None:
        """The package, or a newer release of it, if that is needed."""
        return missing_release(self.minimum_version) if self.is_installed() else not_installed("flashinfer")

    def lacks(self) -> str | None:
        """Also the compiler that the library needs at run time, unless compiled kernels are installed."""
        return self.missing_package() or missing_compiler()

    def arch_of(self, device: torch.device) -> str | None:
        """Architecture by the library's own function."""
        return device_arch(device)

    def as_computed(self, experts: ExpertWeights, topology: Topology) -> ExpertWeights:
        """The experts with the layer's activation scales, if the format has static ones."""
        if experts.format_name in ("fp8_tensor", "nvfp4"):
            return with_layer_input_scales(experts, topology)
        return experts


def missing_compiler() -> str | None:
    """The missing CUDA compiler; None if it is there, or not needed because compiled kernels are installed."""
    if library("jit.env").FLASHINFER_AOT_DIR.is_dir() or importlib.util.find_spec("flashinfer_jit_cache"):
        return None
    try:
        compiler = Path(library("jit.cpp_ext").get_cuda_path()) / "bin" / "nvcc"
    except RuntimeError:  # it finds no CUDA toolkit
        compiler = None
    if compiler is not None and compiler.is_file():
        return None
    major = (torch.version.cuda or "13").partition(".")[0]
    return (
        f"nvcc, with which FlashInfer compiles its kernels: install the CUDA {major} toolkit, or its compiled kernels "
        "as https://docs.flashinfer.ai/installation.html says"
    )


def swiglu_tensors(
    activation: Activation, num_local_experts: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(alpha, beta, limit), each fp32 [E] filled with one number, or three None for plain SwiGLU.

    All three or none: given only one, a kernel would use its own defaults for the others.
    """
    if activation.is_plain:
        return None, None, None
    limit = float("inf") if activation.limit is None else activation.limit

    def filled(value: float) -> torch.Tensor:
        return torch.full((num_local_experts,), value, dtype=torch.float32, device=device)

    return filled(activation.alpha), filled(activation.beta), filled(limit)
