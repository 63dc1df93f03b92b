"""Makes FlashInfer's Python believe that CPU tensors live on a GPU of a given architecture. Replaces probes only."""

import contextlib
import functools
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch


def import_flashinfer() -> None:
    """First import; third-party deprecation warnings at import time are not ours to fix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import flashinfer.cute_dsl
        import flashinfer.fused_moe.core
        import flashinfer.gemm.kernels.grouped_gemm_masked_blackwell  # noqa: F401


@functools.cache
def _places(original: Any, num_modules: int) -> list[tuple[Any, str]]:
    """Modules of FlashInfer, of so many modules in all, and the names under which they imported a function."""
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "flashinfer"]
    return [(module, name) for module in modules for name, value in vars(module).items() if value is original]


def replace_everywhere(monkeypatch: pytest.MonkeyPatch, original: Any, replacement: Any) -> None:
    """Replace a function under every name that FlashInfer's modules imported it as."""
    for module, name in _places(original, len(sys.modules)):
        monkeypatch.setattr(module, name, replacement)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    """Until the test ends every device probe answers `sm<major><minor>` with CUDA 13."""
    import_flashinfer()
    from flashinfer import utils
    from flashinfer.jit import cpp_ext

    replace_everywhere(monkeypatch, utils.get_compute_capability, lambda device: (major, minor))
    replace_everywhere(monkeypatch, utils.device_support_pdl, lambda device: False)
    replace_everywhere(monkeypatch, cpp_ext.is_cuda_version_at_least, lambda version: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)


def pretend_rocm(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """Until the test ends the device is an AMD GPU, such as "gfx950"."""
    properties = SimpleNamespace(gcnArchName=f"{arch}:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)


def built(emulator: Any) -> SimpleNamespace:
    """What a JIT specification gives: here it 'builds' to an emulator."""
    return SimpleNamespace(build_and_load=lambda: emulator, get_library_paths=list)


def uncached(function: Any) -> Any:
    """A cached function of the library with a cache of its own, which does not outlive the emulator."""
    return functools.cache(function.__wrapped__)
