"""Every backend with every transport: a runner is built, or one sentence names both. Before any weight is read."""

import itertools

import pytest

from moe import MoeA2ABackend, MoeBackend, MoeRunner, UnsupportedPathError
from moe.choose.explain import ARCHS, FORMATS
from moe.config import DispatchFormat
from moe.device import Device
from moe.registry import BACKEND_MODULES, load_backend, missing_formats
from tests.moe.backends import hostile

CONFIG = hostile.make_config(8, 2048, 2048, 2)
LL = (DispatchFormat.DEEPEP_LL,)
PAIRS = list(itertools.product([backend for backend in MoeBackend if backend is not MoeBackend.AUTO], MoeA2ABackend))
# The support table of the design. DeepEP's low-latency layout is mooncake's and nixl's too.
BUILDS = {
    "torch": {"none", "deepep", "mooncake", "nixl"},
    "triton": {"none", "deepep"},
    "flashinfer_mxfp4": {"none"},
    "flashinfer_cutlass": {"none"},
    "flashinfer_trtllm": {"none"},
    "flashinfer_cutedsl": {"none", "flashinfer"},
    "deep_gemm": {"none", "deepep", "mooncake", "nixl"},
    "aiter": {"none", "deepep", "mori", "mooncake", "nixl"},
}


def test_pair_builds_or_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for backend, a2a in PAIRS:
        with subtests.test(backend=backend, a2a=a2a):
            assert backend in BACKEND_MODULES, "every backend is built in"
            if a2a in BUILDS[backend]:
                assert MoeRunner(backend, a2a, CONFIG).backend is backend
            else:
                with pytest.raises(UnsupportedPathError) as error:
                    MoeRunner(backend, a2a, CONFIG)
                text = str(error.value)
                assert f"--moe-backend {backend}" in text
                assert f"--moe-a2a-backend {a2a}" in text
                assert "works with --moe-a2a-backend none" in text
                assert "\n" not in text


def test_cutedsl_with_deepep_builds_for_low_latency_alone() -> None:
    backend = MoeBackend.FLASHINFER_CUTEDSL
    assert MoeRunner(backend, MoeA2ABackend.DEEPEP, CONFIG, dispatch_formats=LL)
    with pytest.raises(UnsupportedPathError, match="deepep_normal"):
        MoeRunner(backend, MoeA2ABackend.DEEPEP, CONFIG)


def test_what_a_backend_supports_can_be_built(subtests: pytest.Subtests) -> None:
    for backend, a2a in PAIRS:
        with subtests.test(backend=backend, a2a=a2a):
            entry = load_backend(backend)
            paths = itertools.product(ARCHS, FORMATS)
            supported = any(entry.supports(Device(arch=arch), name, a2a, CONFIG) is None for arch, name in paths)
            has_path = len(missing_formats(backend, a2a, a2a.dispatch_formats)) < len(a2a.dispatch_formats)
            assert supported == has_path
