"""A Hopper GPU for Triton on a machine without one: kernels are compiled, launches are noted and do nothing."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

launched: list[tuple[str, int]] = []  # name of the kernel, its warps


class _Utils:
    def load_binary(self, *_: Any) -> tuple[int, ...]:
        """Module, function, registers, spills, threads."""
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        """Of an H100."""
        return {"max_shared_mem": 232_448}


class _Driver:
    utils = _Utils()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *_: launched.append((source.fn.__name__, metadata.num_warps))


def install() -> None:
    """Let Triton and `compile_ahead` find the GPU. For a program of its own: nothing puts the old driver back."""
    triton.runtime.driver.set_active(_Driver())
    torch.cuda.current_device = lambda: 0  # type: ignore[assignment]
    torch.cuda.set_device = lambda _: None  # type: ignore[assignment]
