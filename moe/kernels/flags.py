"""Flags by which programs of several GPUs wait for each other, in memory that all of them reach.

A flag is an int32 in the memory of the rank that waits for it. Each meeting of the ranks has MAX_RANKS of them, one for
each rank that sets it. The waiting rank clears what it has seen, so all are clear between launches, in whatever order
graphs are replayed.

Import it only where Triton is installed. Shape letter: R ranks.
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def flags_of(flags_ptr, meeting, rank, RANKS: tl.constexpr, MAX_RANKS: tl.constexpr):
    """Pointers [MAX_RANKS] of a meeting: to the flags that this rank sets, and to those that others set here.

    flags: addresses of each rank's flags, int64 [R].
    """
    ranks = tl.arange(0, MAX_RANKS)
    flags_R = tl.load(flags_ptr + ranks, mask=ranks < RANKS, other=0)
    set_by_others = tl.load(flags_ptr + rank).to(tl.pointer_type(tl.int32)) + meeting * MAX_RANKS + ranks
    set_by_this = flags_R.to(tl.pointer_type(tl.int32)) + meeting * MAX_RANKS + rank
    return set_by_this, set_by_others


@triton.jit
def tell_others(set_by_this, rank, RANKS: tl.constexpr, MAX_RANKS: tl.constexpr):
    """Say that what this program has written may be read."""
    ranks = tl.arange(0, MAX_RANKS)
    tl.atomic_xchg(set_by_this, 1, mask=(ranks < RANKS) & (ranks != rank), sem="release", scope="sys")


@triton.jit
def wait_for_others(set_by_others, RANKS: tl.constexpr, MAX_RANKS: tl.constexpr):
    """Wait until the same program of all other ranks has told this one, and clear their flags."""
    none_R = tl.zeros((MAX_RANKS,), tl.int32)
    arrived_R = none_R
    while tl.sum(arrived_R, 0) < RANKS - 1:
        arrived_R += tl.atomic_cas(set_by_others, none_R + 1, none_R, sem="acquire", scope="sys")
