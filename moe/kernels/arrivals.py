"""Sums that several programs of one kernel compute in parts: the last one to arrive adds the parts up.

That saves the launch of a second kernel. The counters stay zero between launches, since the last program resets its
own, so kernels on one stream can share them; two streams at once cannot.
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import functools

import torch
import triton
import triton.language as tl

MAX_COUNTERS = 1 << 16
_SUM_REGISTERS = 64  # of a thread, for the parts that it loads at once
_WARP = 32  # threads


@functools.cache
def counters(device: torch.device, user: str) -> torch.Tensor:
    """int32 zeros [MAX_COUNTERS], made once for each device and kernel (`user`), outside captured graphs."""
    del user
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


def parts_at_once(most: int, num_sums: int, num_warps: int) -> int:
    """How many parts of `num_sums` numbers `sum_parts` loads at once, `most` at most.

    One after the other would take a memory's latency each.
    """
    return max(1, min(most, _SUM_REGISTERS * _WARP * num_warps // num_sums))


@triton.jit
def is_last_to_arrive(counter_ptr, num_programs):
    """True in one program of those that share the counter: the one that finds the stores of all others done.

    Read their results with `cache_modifier=".cg"`: the L1 may hold older ones.
    """
    tl.debug_barrier()  # this program's stores come before its arrival
    is_last = tl.atomic_add(counter_ptr, 1) == num_programs - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def sum_parts(part_ptrs, mask, num_parts, stride, AT_ONCE: tl.constexpr):
    """The parts, which lie `stride` numbers apart, added in their order; AT_ONCE are loaded at a time.

    `part_ptrs`: to the first part. Sums outside of the mask are 0.
    """
    total = tl.load(part_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    for first in tl.range(1, num_parts, AT_ONCE, num_stages=1):
        for offset in tl.static_range(AT_ONCE):
            total += tl.load(
                part_ptrs + (first + offset) * stride, mask=mask & (first + offset < num_parts), other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
    return total
