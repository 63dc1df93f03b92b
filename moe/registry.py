"""Registries of fused functions, runner cores with their permutes, and backends.

A backend module is imported on first use and registers itself with the decorators. `BACKEND_MODULES` lists them all.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch

from moe.backend import Backend
from moe.config import DispatchFormat, MoeA2ABackend, MoeBackend, MoeRunnerConfig
from moe.errors import MoeConfigError
from moe.types import CombineInput


class RunnerCore(Protocol):
    """The kernels of a backend behind its pre-permutes."""

    @property
    def run(self) -> Callable[..., torch.Tensor]:
        """`run(core_input, quant_info, state)`: expert outputs [.., H] for the result of a pre-permute."""


FusedFunc = Callable[..., CombineInput]
PrePermute = Callable[..., object]
PostPermute = Callable[..., CombineInput]
CoreClass = Callable[[MoeRunnerConfig], RunnerCore]
AnyBackend = Backend[Any]  # only the backend itself reads its quant info

BACKEND_MODULES: dict[MoeBackend, str] = {
    MoeBackend.TORCH: "moe.backends.torch",
    MoeBackend.TRITON: "moe.backends.triton.backend",
    MoeBackend.FLASHINFER_MXFP4: "moe.backends.flashinfer.mxfp4",
    MoeBackend.FLASHINFER_CUTLASS: "moe.backends.flashinfer.cutlass",
    MoeBackend.FLASHINFER_TRTLLM: "moe.backends.flashinfer.trtllm",
    MoeBackend.DEEP_GEMM: "moe.backends.deep_gemm",
    MoeBackend.AITER: "moe.backends.aiter",
    MoeBackend.FLASHINFER_CUTEDSL: "moe.backends.flashinfer.cutedsl",
}

_fused_funcs: dict[tuple[MoeA2ABackend, MoeBackend], FusedFunc] = {}
_fused_formats: dict[tuple[MoeA2ABackend, MoeBackend], tuple[DispatchFormat, ...]] = {}
_runner_cores: dict[MoeBackend, CoreClass] = {}
_pre_permutes: dict[tuple[DispatchFormat, MoeBackend], PrePermute] = {}
_post_permutes: dict[tuple[MoeBackend, DispatchFormat], PostPermute] = {}
_backends: dict[MoeBackend, AnyBackend] = {}

Fused = TypeVar("Fused", bound=FusedFunc)
Core = TypeVar("Core", bound=CoreClass)
Pre = TypeVar("Pre", bound=PrePermute)
Post = TypeVar("Post", bound=PostPermute)
BackendClass = TypeVar("BackendClass", bound=type[AnyBackend])
Key = TypeVar("Key")


def _refuse_double(table: Mapping[Key, object], key: Key, what: str) -> None:
    if key in table:
        raise MoeConfigError(f"{what} for {key} is registered twice")


def register_fused_func(
    a2a: MoeA2ABackend, backend: MoeBackend, *, formats: tuple[DispatchFormat, ...] | None = None
) -> Callable[[Fused], Fused]:
    """Register `fused(dispatch_output, quant_info, config, state) -> CombineInput`.

    `formats`: the dispatch formats it supports, if the transport has others too.
    """

    def decorate(fused: Fused) -> Fused:
        _refuse_double(_fused_funcs, (a2a, backend), "a fused function")
        _fused_funcs[a2a, backend] = fused
        _fused_formats[a2a, backend] = formats or a2a.dispatch_formats
        return fused

    return decorate


def register_runner_core(backend: MoeBackend) -> Callable[[Core], Core]:
    """Register a class `Core(config)` with `run(core_input, quant_info, state) -> expert outputs [.., H]`."""

    def decorate(core: Core) -> Core:
        _refuse_double(_runner_cores, backend, "a runner core")
        _runner_cores[backend] = core
        return core

    return decorate


def register_pre_permute(dispatch_format: DispatchFormat, backend: MoeBackend) -> Callable[[Pre], Pre]:
    """Register `pre(dispatch_output, quant_info, config, state) -> core_input`."""

    def decorate(pre: Pre) -> Pre:
        _refuse_double(_pre_permutes, (dispatch_format, backend), "a pre-permute")
        _pre_permutes[dispatch_format, backend] = pre
        return pre

    return decorate


def register_post_permute(backend: MoeBackend, combine_format: DispatchFormat) -> Callable[[Post], Post]:
    """Register `post(core_output, dispatch_output, quant_info, config, state) -> CombineInput`.

    Needed only if the core's output [.., H] is not in the layout that the transport combines. Otherwise the runner
    calls `dispatch_output.result`.
    """

    def decorate(post: Post) -> Post:
        _refuse_double(_post_permutes, (backend, combine_format), "a post-permute")
        _post_permutes[backend, combine_format] = post
        return post

    return decorate


def register_backend(cls: BackendClass) -> BackendClass:
    """Register the class of a backend under its `name`."""
    _refuse_double(_backends, cls.name, "a backend")
    _backends[cls.name] = cls()
    return cls


def load_backend(backend: MoeBackend) -> AnyBackend:
    """The backend object; imports its module on first use."""
    if backend not in BACKEND_MODULES:
        known = ", ".join(sorted(BACKEND_MODULES))
        raise MoeConfigError(f"--moe-backend {backend} is not built in; known: {known}")
    module = BACKEND_MODULES[backend]
    importlib.import_module(module)
    if backend not in _backends:
        raise MoeConfigError(f"{module} registers no backend with the name {backend}")
    return _backends[backend]


def fused_func(a2a: MoeA2ABackend, backend: MoeBackend) -> FusedFunc | None:
    """The fused function of a pair, or None."""
    load_backend(backend)
    return _fused_funcs.get((a2a, backend))


def three_part(
    dispatch_format: DispatchFormat, backend: MoeBackend
) -> tuple[PrePermute, CoreClass, PostPermute | None] | None:
    """(pre-permute, core class, post-permute or None) of a dispatch format, or None without pre-permute or core."""
    load_backend(backend)
    pre = _pre_permutes.get((dispatch_format, backend))
    core = _runner_cores.get(backend)
    post = _post_permutes.get((backend, dispatch_format))
    return (pre, core, post) if pre and core else None


def missing_formats(
    backend: MoeBackend, a2a: MoeA2ABackend, formats: tuple[DispatchFormat, ...]
) -> list[DispatchFormat]:
    """Formats of a transport that a backend does not support; empty if the pair works."""
    if fused_func(a2a, backend):
        return [dispatch_format for dispatch_format in formats if dispatch_format not in _fused_formats[a2a, backend]]
    return [dispatch_format for dispatch_format in formats if three_part(dispatch_format, backend) is None]
