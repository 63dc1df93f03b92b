"""Triton kernels that read rows of logits in parallel chunks: best token, probability mass, the likely candidates.

`engine.gpu_sampler` launches them, `engine.gpu_draw` finishes what they begin. A row takes two passes:

    row_stats   best token of each chunk, best logit of each group      grid (rows, chunks)
    combine     best token of each row; where candidates begin          grid (rows,)
    collect     mass of each chunk; the list of candidates              grid (drawn rows, chunks)

A token's weight is `exp((logit - best) / temperature)`, between 0 and 1. Its mass is the weight in units of 2^-44, an
integer: sums of integers do not depend on their order, so a row's result is the same in every batch and every run.
A weight below 2^-44 counts as 0: all such tokens together have less than 2^-26 of the probability.

Shape letters: R rows, V vocabulary, S chunks of a row, G groups of a row, C candidates of a row.
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"

import triton
import triton.language as tl

LEAST_BITS = (127 - 44) << 23
"""Bit pattern of the fp32 number 2^-44. Patterns of positive numbers are in the order of the numbers."""

PLAIN, FILTERED = 1, 2
"""How a row is drawn: from all tokens, or from those that its filters leave."""

_LEAST = tl.constexpr(2.0**-44)
_UNIT = tl.constexpr(2.0**44)
_LEAST_BITS = tl.constexpr(LEAST_BITS)
_FILTERED = tl.constexpr(FILTERED)


@triton.jit
def is_finite(x):
    """True for numbers; the kernels read NaN as infinity."""
    return (x < float("inf")) & (x > float("-inf"))


@triton.jit
def weight_bits(x, best, temperature):
    """Bit patterns of the weights, 0 for the smallest ones."""
    weight = tl.exp((x - best) / temperature)
    return tl.where(weight < _LEAST, 0.0, weight).to(tl.int32, bitcast=True)


@triton.jit
def mass_of(bits):
    """Weights in units of 2^-44."""
    return (bits.to(tl.float32, bitcast=True) * _UNIT).to(tl.int64)


@triton.jit
def _in_order(pattern):
    """From bit patterns of fp32 numbers to integers of the same order, and back."""
    return tl.where(pattern < 0, pattern ^ 0x7FFFFFFF, pattern)


@triton.jit
def row_stats(
    logits_ptr, ints_ptr, maxima_ptr, ids_ptr, groups_ptr, vocab_size, logits_stride, num_chunks,
    NUM_INTS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Per chunk the largest logit and the first token that has it; per group the largest logit, where it is needed."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = tl.load(ints_ptr + row * NUM_INTS)
    rank = tl.load(ints_ptr + row * NUM_INTS + 5)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + source * logits_stride + ids, mask=ids < vocab_size, other=float("-inf"))
    x = tl.where(x < float("inf"), x, float("inf"))  # NaN, too
    best = tl.max(x, 0)
    tl.store(maxima_ptr + row * num_chunks + chunk, best)
    tl.store(ids_ptr + row * num_chunks + chunk, tl.min(tl.where(x == best, ids, vocab_size), 0))
    if rank > 0:
        NUM: tl.constexpr = CHUNK // GROUP
        at = (row * num_chunks + chunk) * NUM + tl.arange(0, NUM)
        tl.store(groups_ptr + at, tl.max(tl.reshape(x, [NUM, GROUP]), 1))


@triton.jit
def combine(
    ints_ptr, floats_ptr, maxima_ptr, ids_ptr, groups_ptr, best_ptr, cut_ptr, num_listed_ptr, tokens_ptr, kept_ptr,
    num_chunks, num_groups,
    NUM_INTS: tl.constexpr, NUM_FLOATS: tl.constexpr, S_PAD: tl.constexpr, G_PAD: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """The best token of each row, -1 if the row is not finite, and the weight from which tokens become candidates.

    That is the `rank`-th largest of the groups' largest weights, so at least `rank` tokens become candidates, and
    seldom many more. `rank` 0: the host knows the weight.
    """
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, S_PAD)
    maxima = tl.load(maxima_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf"))
    ids = tl.load(ids_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=0x7FFFFFFF)
    best = tl.max(maxima, 0)
    token = tl.min(tl.where(maxima == best, ids, 0x7FFFFFFF), 0)
    token = tl.where(is_finite(best), token, -1).to(tl.int64)
    tl.store(best_ptr + row, best)
    tl.store(tokens_ptr + row, token)
    tl.store(num_listed_ptr + row, 0)
    if KEEP:  # a row without a token is dropped when it is collected; until then it needs a valid id
        place = tl.load(ints_ptr + row * NUM_INTS + 1)
        tl.store(kept_ptr + place, tl.maximum(token, 0), mask=place >= 0)
    rank = tl.load(ints_ptr + row * NUM_INTS + 5)
    cut = tl.load(ints_ptr + row * NUM_INTS + 6).to(tl.int32)
    if (rank > 0) & is_finite(best):
        groups = tl.arange(0, G_PAD)
        largest = tl.load(groups_ptr + row * num_groups + groups, mask=groups < num_groups, other=float("-inf"))
        keys = _in_order(largest.to(tl.int32, bitcast=True)).to(tl.int64)
        low = tl.full([], -2147483648, tl.int64)
        for level in range(32):
            trial = low + (tl.full([], 1, tl.int64) << (31 - level))
            low = tl.where(tl.sum((keys >= trial).to(tl.int32), 0) >= rank, trial, low)
        border = _in_order(low.to(tl.int32)).to(tl.float32, bitcast=True)
        temperature = tl.load(floats_ptr + row * NUM_FLOATS).to(tl.float32)
        # The device's `exp` may put neighbours in the wrong order, by a bit or two: a margin keeps them all.
        cut = tl.maximum(weight_bits(border, best, temperature) - 8, _LEAST_BITS)
    tl.store(cut_ptr + row, cut)


@triton.jit
def collect(
    logits_ptr, rows_ptr, ints_ptr, floats_ptr, best_ptr, cut_ptr, masses_ptr, num_listed_ptr, listed_bits_ptr,
    listed_ids_ptr, vocab_size, logits_stride, num_chunks,
    NUM_INTS: tl.constexpr, NUM_FLOATS: tl.constexpr, CHUNK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Per chunk the mass, and its candidates appended to the row's list, in any order; those beyond C are left out."""
    row, chunk = tl.load(rows_ptr + tl.program_id(0)), tl.program_id(1)
    if row < 0:
        return
    best = tl.load(best_ptr + row)
    if is_finite(best):
        source = tl.load(ints_ptr + row * NUM_INTS)
        temperature = tl.load(floats_ptr + row * NUM_FLOATS).to(tl.float32)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + source * logits_stride + ids, mask=ids < vocab_size, other=float("-inf"))
        bits = weight_bits(x, best, temperature)
        tl.store(masses_ptr + row * num_chunks + chunk, tl.sum(mass_of(bits), 0))
        if tl.load(ints_ptr + row * NUM_INTS + 4) == _FILTERED:
            is_listed = bits >= tl.load(cut_ptr + row)
            num = tl.sum(is_listed.to(tl.int32), 0)
            if num > 0:
                at = tl.atomic_add(num_listed_ptr + row, num) + tl.cumsum(is_listed.to(tl.int32), 0) - 1
                tl.store(listed_bits_ptr + row * C + at, bits, mask=is_listed & (at < C))
                tl.store(listed_ids_ptr + row * C + at, ids, mask=is_listed & (at < C))
