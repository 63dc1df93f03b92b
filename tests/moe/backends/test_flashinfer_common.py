"""What all FlashInfer backends share: version numbers and the oldest release that each of them takes."""

import importlib.metadata

import pytest

from moe import MoeBackend, Topology, UnsupportedPathError
from moe.backends.flashinfer.common import parse_version
from moe.registry import load_backend
from tests.moe.backends import hostile
from tests.moe.backends.scenarios import install

E, H, I, K = 4, 256, 256, 2
PATHS = [
    (MoeBackend.FLASHINFER_CUTLASS, "cutlass-fp8_block", "fp8_block", "0.6.7", "0.6.8"),
    (MoeBackend.FLASHINFER_CUTEDSL, "cutedsl-v2", "nvfp4", "0.6.7", "0.6.8"),
    (MoeBackend.FLASHINFER_TRTLLM, "trtllm-fp8_block", "fp8_block", "0.5.9", "0.6.0"),
]


@pytest.mark.parametrize(
    ("text", "version"),
    [("0.7.2.post1", (0, 7, 2)), ("0.6.11rc1", (0, 6, 11)), ("1.0", (1, 0, 0)), ("0.6.8+cu130", (0, 6, 8))],
)
def test_version_numbers(text: str, version: tuple[int, int, int]) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(("backend", "path", "name", "too_old", "oldest"), PATHS)
def test_version_gates(
    monkeypatch: pytest.MonkeyPatch, backend: MoeBackend, path: str, name: str, too_old: str, oldest: str
) -> None:
    install(monkeypatch, path)
    experts = hostile.quantized_experts(name, E, H, I, x=hostile.tokens(4, H))
    config, installed = hostile.make_config(E, H, I, K), {"flashinfer-python": too_old}
    monkeypatch.setattr(importlib.metadata, "version", lambda package: installed[package])
    with pytest.raises(
        UnsupportedPathError,
        match=rf"--moe-backend {backend} needs flashinfer-python {oldest} or newer and found {too_old}",
    ):
        load_backend(backend).prepare(experts, config, Topology())
    installed["flashinfer-python"] = oldest
    assert load_backend(backend).prepare(experts, config, Topology())
