"""The self-check behind every transport: clean layers pass in each layout, a neighbour's weights are named."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from moe import MoeA2ABackend, MoeBackend, MoeRunner, SelfCheckError, Topology, registry
from moe.check.selfcheck import SelfCheckReport, check_layer
from moe.config import DispatchDtype, DispatchFormat
from moe.formats import ExpertWeights
from moe.registry import load_backend
from tests.emulators.aiter import install_aiter
from tests.emulators.cutedsl import install_cutedsl
from tests.emulators.deep_gemm import install_deep_gemm
from tests.moe.backends import hostile
from tests.moe.backends.hostile import lost_expert
from tests.tables import rows

E, K, H, I = 8, 3, 2048, 128


@dataclass(frozen=True, kw_only=True)
class Path:
    backend: MoeBackend
    a2a: MoeA2ABackend
    formats: tuple[DispatchFormat, ...]
    name: str
    install: Callable[[pytest.MonkeyPatch], Any] = lambda patch: None
    dispatch_dtype: DispatchDtype = DispatchDtype.BF16
    hidden: int = H

    def __str__(self) -> str:
        return f"{self.backend}-{self.a2a}-{'+'.join(self.formats)}-{self.name}-{self.dispatch_dtype}"


NORMAL, LL = DispatchFormat.DEEPEP_NORMAL, DispatchFormat.DEEPEP_LL
TORCH, GEMM, AITER, CUTE = (
    MoeBackend.TORCH, MoeBackend.DEEP_GEMM, MoeBackend.AITER, MoeBackend.FLASHINFER_CUTEDSL,
)  # fmt: skip


install_sm100 = functools.partial(install_deep_gemm, arch="sm100")
BOTH = {"a2a": MoeA2ABackend.DEEPEP, "formats": (NORMAL, LL)}
LL_ONLY = {"a2a": MoeA2ABackend.DEEPEP, "formats": (LL,)}
ON_GEMM = {"backend": GEMM, "name": "fp8_block"}
ON_AITER = {"backend": AITER, "install": install_aiter}
ON_CUTE = {"backend": CUTE, "install": install_cutedsl, "name": "nvfp4"}
MORI = {"a2a": MoeA2ABackend.MORI, "hidden": 256}
FLASHINFER = {"a2a": MoeA2ABackend.FLASHINFER, "formats": (DispatchFormat.FLASHINFER,)}
PATHS = [
    Path(backend=TORCH, name="mxfp4", **BOTH),
    Path(backend=TORCH, name="bf16", hidden=2880, a2a=MoeA2ABackend.NIXL, formats=(LL,)),
    Path(install=install_deep_gemm, dispatch_dtype=DispatchDtype.FP8, **ON_GEMM, **BOTH),
    Path(install=install_sm100, dispatch_dtype=DispatchDtype.FP8_UE8M0, **ON_GEMM, **BOTH),
    Path(name="bf16", **ON_AITER, **BOTH),
    Path(name="mxfp4", **ON_AITER, **LL_ONLY),
    Path(name="bf16", formats=(DispatchFormat.MORI_NORMAL,), **ON_AITER, **MORI),
    Path(name="fp8_block", formats=(DispatchFormat.MORI_NORMAL,), dispatch_dtype=DispatchDtype.FP8, **ON_AITER, **MORI),
    Path(name="fp8_block", formats=(DispatchFormat.MORI_LL,), dispatch_dtype=DispatchDtype.FP8, **ON_AITER, **MORI),
    Path(**ON_CUTE, **LL_ONLY),
    Path(dispatch_dtype=DispatchDtype.NVFP4, **ON_CUTE, **LL_ONLY),
    Path(**ON_CUTE, **FLASHINFER),
    Path(dispatch_dtype=DispatchDtype.NVFP4, **ON_CUTE, **FLASHINFER),
]


@functools.cache
def experts_of(path: Path) -> ExpertWeights:
    inter = 256 if path.backend is AITER else I
    if path.name == "nvfp4":
        x = hostile.tokens(16, path.hidden, size=3.0)
        whole = hostile.quantized_experts("nvfp4", E, path.hidden, inter, x=x)
        return hostile.with_layer_scales(whole, whole)
    return hostile.plain_experts(path.name, E, path.hidden, inter)


def check(path: Path, rank: int, prepared: Callable[[ExpertWeights], ExpertWeights]) -> SelfCheckReport:
    whole = experts_of(path)
    own = hostile.with_layer_scales(hostile.shard(whole, ep=(2, rank)), whole)
    topology = Topology(ep_size=2, ep_rank=rank, a2a=path.a2a, dispatch_dtype=path.dispatch_dtype)
    dtype = torch.float32 if path.backend is TORCH else torch.bfloat16
    config = hostile.make_config(E, path.hidden, own.intermediate_size, K, place=topology, dtype=dtype)
    runner = MoeRunner(path.backend, path.a2a, config, dispatch_formats=path.formats)
    info = load_backend(path.backend).prepare(prepared(own), config, topology)
    return check_layer(runner, info, own, layer=4, topology=topology)


@rows("path", *PATHS)
def test_clean_passes_and_a_neighbours_weights_are_named(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    path.install(monkeypatch)
    report = check(path, 1, lambda experts: experts)
    assert 0 < report.worst_error <= report.tolerance
    assert report.path == f"{path.backend}/{path.a2a}/{path.name}"
    with pytest.raises(SelfCheckError, match=f"layer 4, {report.path}.*: expert 6 differs"):
        check(path, 1, lost_expert)


def test_both_formats_of_a_transport_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that only one of DeepEP's two layouts has is found, and the layout named."""
    swapped = lambda out_RH, dispatched, *rest: dispatched.result(out_RH.roll(1, 0), False)  # noqa: E731
    monkeypatch.setitem(registry._post_permutes, (TORCH, LL), swapped)
    with pytest.raises(SelfCheckError, match=r"layer 4, torch/deepep/mxfp4 \(deepep_ll\): "):
        check(PATHS[0], 0, lambda experts: experts)
