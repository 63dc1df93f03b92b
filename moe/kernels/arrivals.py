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


@functools.cache
def counters(device: torch.device, user: str) -> torch.Tensor:
    """int32 zeros [MAX_COUNTERS], made once for each device and kernel (`user`), outside captured graphs."""
    del user
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


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
