"""Watches kernels in Triton's interpreter: where they read and write, how often, and that early starts wait in time.

On a GPU an address outside of all tensors, or a read of what the kernel before has not written yet, mostly goes
unnoticed; here each ends the case. Prefetches and waits, which the interpreter does not know, are replaced.
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def"

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from moe.kernels import gemm, group, products, quantize

_KERNELS = (gemm.direct_gemm, gemm.grouped_gemm, group.group_slots, group.unpermute_sum, quantize.quantize_rows)


class WrongAccessError(Exception):
    """What a kernel must not do."""


def fails_with(words: str, launch: Callable[[], object]) -> bool:
    """Whether the interpreter ends a launch with an error that has these words."""
    try:
        launch()
    except InterpreterError as error:
        return words in str(error)
    return False


class Watch:
    """What the running launch may touch, and what its programs have announced."""

    def __init__(self) -> None:
        self.tensors: list[tuple[int, int]] = []
        self.early: tuple[int, int] = (0, 0)  # what may be read before the wait
        self.must_wait = self.is_read_early = False
        self.waited: tuple[int, ...] | None = None  # the last program that has waited
        self.num_waited = 0
        self.prefetched: set[int] = set()
        self.tail: tuple[int, int] = (0, 0)
        self.num_parts = 1  # of the reduction axis; only the last one may read the tail
        self.reads: dict[int, np.ndarray[Any, Any]] = {}  # by where a tensor of words begins, of each word

    def start(self, kernel: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """A launch: its tensors, and whether it starts early."""
        self.finish()
        self.tensors = [extent(part) for part in arguments if isinstance(part, torch.Tensor)]
        self.must_wait, self.waited, self.early = keywords.get("USE_PDL", False), None, (0, 0)
        self.num_waited = 0
        is_direct, named = kernel is gemm.direct_gemm, dict(zip(kernel.arg_names, arguments, strict=False))
        self.is_read_early = is_direct and keywords["IS_FIRST"]  # the next kernel reads the ids without a wait
        if is_direct and not keywords["IS_FIRST"]:
            self.early = extent(named["ids_ptr"])
        self.num_parts, self.tail, self.reads = keywords.get("SPLIT_K", 1), (0, 0), {}
        if keywords.get("HAS_TAIL"):
            self.tail = extent(named["tail_ptr"])
        if is_direct and keywords["SLOTS_PAD"] == 0 and keywords["FORMAT"] == products.MXFP4.value:
            for part in (named["w_ptr"], named["tail_ptr"]):
                self.reads[part.data_ptr()] = np.zeros(part.numel(), dtype=np.uint8)

    def finish(self) -> None:
        """Nothing may have been fetched in vain, and no program may end before the kernel before its own does."""
        if self.prefetched:
            raise WrongAccessError(f"{len(self.prefetched)} blocks were fetched early and never read")
        if self.must_wait and self.num_waited < math.prod(interpreter.interpreter_builder.grid_dim):
            raise WrongAccessError("a program never waited")

    def check(self, ptrs: Any, mask: Any, what: str) -> None:
        """All addresses lie in one tensor, and are touched after the wait."""
        addresses = ptrs.data if mask.data.all() else ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
        if not addresses.size:
            return
        low, high = int(addresses.min()), int(addresses.max())
        if self.tail[0] <= low < self.tail[1] and program()[2] % self.num_parts != self.num_parts - 1:
            raise WrongAccessError("a part of the columns that does not end them read the tail")
        self.count(addresses, low, ptrs.get_element_ty().primitive_bitwidth // 16)
        self.check_range(low, high + ptrs.get_element_ty().primitive_bitwidth // 8, what)
        is_early = what == "read" and self.early[0] <= low and high < self.early[1]
        if self.must_wait and self.waited != program() and not is_early:
            raise WrongAccessError(f"a {what} before the wait")
        for address in [fetched for fetched in self.prefetched if low <= fetched <= high]:
            if (addresses == address).any():
                self.prefetched.remove(address)

    def count(self, addresses: Any, low: int, width: int) -> None:
        """Where every expert has one tile, each word of its weights is read once."""
        for begin, counts in self.reads.items():
            if begin <= low < begin + 2 * counts.size:
                places = np.unique(addresses.astype(np.int64) - begin) // 2
                for place in range(width):
                    counts[places + place] += 1
                if (counts[places] > 1).any():
                    raise WrongAccessError("a weight was read twice")

    def check_range(self, begin: int, end: int, what: str) -> None:
        if not any(first <= begin and end <= last for first, last in self.tensors):
            raise WrongAccessError(f"a {what} outside of all tensors")

    def prefetch(self, ptr: Any, num_bytes: Any) -> None:
        """In place of `gemm._prefetch`."""
        address, size = int(ptr.handle.data.item()), int(getattr(num_bytes, "value", num_bytes))
        if address % 16 or size % 16:
            raise WrongAccessError("a prefetch of other than whole 16-byte pieces")
        self.check_range(address, address + size, "prefetch")
        self.prefetched.add(address)

    def wait(self) -> None:
        """In place of `gdc_wait`."""
        self.num_waited += self.waited != program()
        self.waited = program()

    def signal(self) -> None:
        """In place of `gdc_launch_dependents`."""
        if self.is_read_early and self.waited != program():
            raise WrongAccessError("the next kernel may read the ids before they are written")


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def program() -> tuple[int, ...]:
    return tuple(interpreter.interpreter_builder.grid_idx)


def watch(*more: Any) -> Watch:
    """From now on our kernels, and `more`, raise where they do what they must not do."""
    watching = Watch()

    for kernel in (*_KERNELS, *more):
        kernel.add_pre_run_hook(
            lambda *arguments, kernel=kernel, **keywords: watching.start(kernel, arguments, keywords)
        )
    for module in (gemm, group, quantize):
        module.gdc_wait, module.gdc_launch_dependents = watching.wait, watching.signal
    gemm._prefetch = watching.prefetch
    builder = interpreter.InterpreterBuilder
    load, store, update = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def checked_load(self: Any, ptrs: Any, mask: Any, other: Any, *others: Any) -> Any:
        watching.check(ptrs, mask, "read")
        loaded = load(self, ptrs, mask, other, *others)
        if other is None:  # what stands there is anything
            is_hidden = ~np.broadcast_to(mask.data, loaded.data.shape)
            loaded.data[is_hidden] = np.frombuffer(b"\xff" * loaded.data.itemsize, dtype=loaded.data.dtype)
        return loaded

    def checked_store(self: Any, ptrs: Any, value: Any, mask: Any, *others: Any) -> Any:
        watching.check(ptrs, mask, "write")
        return store(self, ptrs, value, mask, *others)

    def checked_update(self: Any, operation: Any, ptrs: Any, value: Any, mask: Any, *others: Any) -> Any:
        watching.check(ptrs, mask, "write")
        return update(self, operation, ptrs, value, mask, *others)

    builder.create_atomic_rmw = checked_update
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    return watching
