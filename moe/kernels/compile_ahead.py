"""Compiles Triton kernels before they are launched, several at a time.

Triton compiles a kernel when it is first launched, so a start would compile one after another. `compile_ahead` first
runs the same code with nothing launched: `launch`, through which all our kernels are launched, gives each new kernel
to a pool of threads. When they are done, the code can run for real and finds its kernels in memory. Threads suffice,
because Triton holds Python's lock only while it reads a kernel's source, about a seventh of the time.

While kernels are collected, their outputs hold whatever was in memory. So the code may compute with them, but must not
index with them, branch on them, or hand them to another library as indices.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

_MAX_WORKERS = 16
_ALIGNMENT = 16  # bytes: Triton compiles a kernel anew for pointers that are not multiples of it
_ONE_PROGRAM = (1, 1, 1)

_log = logging.getLogger(__name__)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`, to be called with the kernel's arguments; within `compile_ahead` the call only compiles."""
    collector = _COLLECTOR.get()
    return kernel[grid] if collector is None else partial(collector.add, kernel, grid)


def compile_only(kernel: Any) -> Callable[..., None]:
    """To be called with the kernel's arguments: compiles it for them and loads it on the device, launching nothing."""

    def call(*arguments: Any, **constants: Any) -> None:
        _compile_and_load(partial(kernel.warmup, *arguments, grid=(1,), **constants))

    return call


def compile_ahead(what: str, run: Callable[[], object], device: torch.device) -> None:
    """Compile the kernels that `run` launches on `device`, and load them there; `run` is called, nothing is launched.

    Nothing happens on a CPU or without Triton. Errors are logged, not raised: the real launch compiles what is missing.
    """
    if device.type != "cuda":
        return
    try:
        from triton import AsyncCompileMode
    except ImportError:
        return
    start_s, num_workers = time.monotonic(), min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
    pool = _LoadingPool(num_workers, initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),))
    collector = _Collector()
    token = _COLLECTOR.set(collector)
    try:
        with pool, AsyncCompileMode(pool, ignore_errors=True):
            run()
    except Exception as error:
        _log.warning("%s: not all kernels are compiled ahead: %s", what, _in_one_line(error))
    finally:
        _COLLECTOR.reset(token)
    if errors := pool.errors():
        collector.forget()
        _log.warning(
            "%s: kernels that could not be compiled ahead: %d; the first: %s",
            what, len(errors), _in_one_line(errors[0]),
        )  # fmt: skip
    _log.info(
        "%s: compiled or loaded %d kernels ahead in %.1f s with %d workers",
        what, pool.num_kernels - len(errors), time.monotonic() - start_s, num_workers,
    )  # fmt: skip


class _Collector:
    """Gives each launch that may need a kernel of its own to Triton, which compiles it in the pool."""

    def __init__(self) -> None:
        self._seen: set[tuple[Any, ...]] = set()
        self._kernels: dict[int, Any] = {}

    def add(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Compile `kernel` for these arguments."""
        key = (id(kernel), *_kinds(arguments), *constants, *_kinds(constants.values()))
        if key not in self._seen:  # Triton would find that out too, thirty times more slowly
            self._seen.add(key)
            self._kernels[id(kernel)] = kernel
            kernel.warmup(*arguments, grid=grid, **constants)

    def forget(self) -> None:
        """Drop what Triton keeps in memory of these kernels, since from 3.7 on it keeps a failed compilation too."""
        for kernel in self._kernels.values():
            getattr(kernel, "device_caches", {}).clear()  # a Triton that names it otherwise must not end a start


class _LoadingPool(ThreadPoolExecutor):
    """Also loads what it has compiled onto the device, and so builds the launcher of Triton 3.6, a run of gcc."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._futures: list[Future[Any]] = []

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """See the base class; `function` compiles a kernel and returns it."""
        future = super().submit(_compile_and_load, partial(function, *arguments, **options))
        self._futures.append(future)
        return future

    @property
    def num_kernels(self) -> int:
        """Of all that were submitted."""
        return len(self._futures)

    def errors(self) -> list[BaseException]:
        """Of kernels that could not be compiled or loaded."""
        return [error for future in self._futures if (error := future.exception()) is not None]


def _compile_and_load(compile_kernel: Callable[[], Any]) -> Any:
    kernel = compile_kernel()
    kernel[_ONE_PROGRAM]
    return kernel


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _kinds(values: Iterable[Any]) -> list[Any]:
    """What a kernel may be compiled for: dtype and alignment of tensors, and numbers, of which Triton needs less."""
    return [
        (value.dtype, value.data_ptr() % _ALIGNMENT) if isinstance(value, torch.Tensor) else (type(value), value)
        for value in values
    ]


_COLLECTOR: ContextVar[_Collector | None] = ContextVar("_COLLECTOR", default=None)
