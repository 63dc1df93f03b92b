"""Registries of the MoE paths: fused functions, runner cores with their permutes, and backends.

A backend module registers itself with the decorators when it is first asked for; `BACKEND_MODULES` is the whole list.
"""

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from moe.config import DispatchFormat, MoeA2ABackend, MoeBackend
from moe.errors import MoeConfigError

BACKEND_MODULES: dict[MoeBackend, str] = {
    MoeBackend.TORCH: "moe.backends.torch.backend",
    MoeBackend.TRITON: "moe.backends.triton.backend",
    MoeBackend.FLASHINFER_MXFP4: "moe.backends.flashinfer.mxfp4",
    MoeBackend.FLASHINFER_CUTLASS: "moe.backends.flashinfer.cutlass",
    MoeBackend.FLASHINFER_TRTLLM: "moe.backends.flashinfer.trtllm",
    MoeBackend.DEEP_GEMM: "moe.backends.deep_gemm.backend",
    MoeBackend.AITER: "moe.backends.aiter.backend",
    MoeBackend.FLASHINFER_CUTEDSL: "moe.backends.flashinfer.cutedsl",
}

# Permutes of a backend that live in modules of their own, one per kind of transport.
PERMUTE_MODULES: dict[MoeBackend, tuple[str, ...]] = {
    MoeBackend.TORCH: ("moe.backends.torch.deepep",),
    MoeBackend.DEEP_GEMM: ("moe.backends.deep_gemm.permutes",),
    MoeBackend.AITER: ("moe.backends.aiter.permutes",),
}

_fused_funcs: dict[tuple[MoeA2ABackend, MoeBackend], Callable[..., Any]] = {}
_fused_formats: dict[tuple[MoeA2ABackend, MoeBackend], tuple[DispatchFormat, ...]] = {}
_runner_cores: dict[MoeBackend, type] = {}
_pre_permutes: dict[tuple[DispatchFormat, MoeBackend], Callable[..., Any]] = {}
_post_permutes: dict[tuple[MoeBackend, DispatchFormat], Callable[..., Any]] = {}
_backends: dict[MoeBackend, Any] = {}

T = TypeVar("T")


def _register(table: dict[Any, Any], key: Any, what: str) -> Callable[[T], T]:
    def decorate(entry: T) -> T:
        if key in table:
            raise MoeConfigError(f"{what} for {key} is registered twice")
        table[key] = entry
        return entry

    return decorate


def register_fused_func(
    a2a: MoeA2ABackend, backend: MoeBackend, *, formats: tuple[DispatchFormat, ...] | None = None
) -> Callable[[T], T]:
    """Register `fused(dispatch_output, quant_info, config, state) -> CombineInput`.

    `formats`: the dispatch formats it takes, where the transport has more of them.
    """
    _fused_formats.setdefault((a2a, backend), formats or a2a.dispatch_formats)
    return _register(_fused_funcs, (a2a, backend), "a fused function")


def register_runner_core(backend: MoeBackend) -> Callable[[T], T]:
    """Register a class `Core(config)` with `run(core_input, quant_info, state) -> core_output`."""
    return _register(_runner_cores, backend, "a runner core")


def register_pre_permute(dispatch_format: DispatchFormat, backend: MoeBackend) -> Callable[[T], T]:
    """Register `pre(dispatch_output, quant_info, config, state) -> core_input`."""
    return _register(_pre_permutes, (dispatch_format, backend), "a pre-permute")


def register_post_permute(backend: MoeBackend, combine_format: DispatchFormat) -> Callable[[T], T]:
    """Register `post(core_output, dispatch_output, quant_info, config, state) -> CombineInput`.

    Needed only where the core's output [.., H] is not laid out as the transport wants it back; else the runner calls
    `dispatch_output.result`.
    """
    return _register(_post_permutes, (backend, combine_format), "a post-permute")


def register_backend(backend: MoeBackend) -> Callable[[type[T]], type[T]]:
    """Register the class whose instance answers `supports()` and `prepare()` for `backend`."""

    def decorate(cls: type[T]) -> type[T]:
        _register(_backends, backend, "a backend")(cls())
        return cls

    return decorate


def load_backend(backend: MoeBackend) -> Any:
    """The backend object, its module imported on first use."""
    if backend not in BACKEND_MODULES:
        known = ", ".join(sorted(BACKEND_MODULES))
        raise MoeConfigError(f"--moe-backend {backend} is not built in; known: {known}")
    for module in (BACKEND_MODULES[backend], *PERMUTE_MODULES.get(backend, ())):
        importlib.import_module(module)
    return _backends[backend]


def fused_func(a2a: MoeA2ABackend, backend: MoeBackend) -> Callable[..., Any] | None:
    """The fused function of a pair, or None."""
    load_backend(backend)
    return _fused_funcs.get((a2a, backend))


def three_part(
    dispatch_format: DispatchFormat, backend: MoeBackend
) -> tuple[Callable[..., Any], type, Callable[..., Any] | None] | None:
    """(pre-permute, core class, post-permute or None) of a dispatch format, or None without pre-permute or core."""
    load_backend(backend)
    pre = _pre_permutes.get((dispatch_format, backend))
    core = _runner_cores.get(backend)
    post = _post_permutes.get((backend, dispatch_format))
    return (pre, core, post) if pre and core else None


def missing_formats(
    backend: MoeBackend, a2a: MoeA2ABackend, formats: tuple[DispatchFormat, ...]
) -> list[DispatchFormat]:
    """Formats of a transport that a backend cannot take; empty when the pair works."""
    if fused_func(a2a, backend):
        return [dispatch_format for dispatch_format in formats if dispatch_format not in _fused_formats[a2a, backend]]
    return [dispatch_format for dispatch_format in formats if three_part(dispatch_format, backend) is None]
