"""Makes FlashInfer's Python believe that CPU tensors live on a GPU of a given architecture. Replaces probes only."""

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterator
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


@contextlib.contextmanager
def _no_device_switch(device: object) -> Iterator[None]:
    del device
    yield


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    """Until the test ends every device probe answers `sm<major><minor>` with CUDA 13."""
    import_flashinfer()
    from flashinfer import utils
    from flashinfer.jit import cpp_ext

    replace_everywhere(monkeypatch, utils.get_compute_capability, lambda device: (major, minor))
    replace_everywhere(monkeypatch, utils.device_support_pdl, lambda device: False)
    replace_everywhere(monkeypatch, cpp_ext.is_cuda_version_at_least, lambda version: True)
    monkeypatch.setattr(torch.cuda, "device", _no_device_switch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)


class BuiltModule:
    """What a JIT specification gives: here it 'builds' to an emulator."""

    def __init__(self, emulator: Any) -> None:
        self.emulator = emulator

    def build_and_load(self) -> Any:
        return self.emulator

    def get_library_paths(self) -> list[str]:
        return []
