"""A device that this machine has not, with the library that a backend calls there, both emulated."""

import pytest

from moe.device import Device
from tests.emulators.aiter import install_aiter
from tests.emulators.cutedsl import install_cutedsl
from tests.emulators.cutlass import install_cutlass
from tests.emulators.deep_gemm import install_deep_gemm
from tests.emulators.trtllm import install_trtllm


def install(monkeypatch: pytest.MonkeyPatch, backend: str, arch: str) -> None:
    """The device, and the library that the backend calls."""
    monkeypatch.setattr("moe.choose.select.probe_device", lambda device: Device(arch=arch))
    number = int(arch[2:]) if arch.startswith("sm") else 0
    if backend == "deep_gemm":
        install_deep_gemm(monkeypatch, arch)
    elif backend == "aiter":
        install_aiter(monkeypatch, arch)
    elif backend == "flashinfer_cutedsl":
        install_cutedsl(monkeypatch)
    elif backend == "flashinfer_trtllm" or (backend, arch) == ("flashinfer_mxfp4", "sm100"):
        install_trtllm(monkeypatch, *divmod(number, 10))
    elif backend.startswith("flashinfer"):
        install_cutlass(monkeypatch, *divmod(number, 10))
