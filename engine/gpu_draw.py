"""Triton kernels that finish a row, one program each: filter and draw a token, rank tokens for log-probabilities.

They read the list of candidates that `engine.gpu_rows` collected. If the filters reach beyond it, which is rare, they
read the whole row instead; the result is the same, since all sums are of integers.

Filters keep a prefix of the tokens sorted by weight, equal weights by id. So a filter is a cut: the weight of the last
token that stays, and how many of the tokens of exactly this weight stay. The cut is found without sorting, by fixing
its bit pattern three bits at a time: of eight patterns, which is the largest that enough tokens reach?

A draw is an inverse-CDF lookup in order of token id, as in `engine.sampler`.
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"

import triton
import triton.language as tl

from engine.gpu_rows import FILTERED, LEAST_BITS, is_finite, mass_of, weight_bits

_FILTERED = tl.constexpr(FILTERED)
_LEAST_BITS = tl.constexpr(LEAST_BITS)
_ALL = tl.constexpr(2**62)  # more than any number of tokens
_LAST_ID = tl.constexpr(2**31 - 1)
_ID_LEVELS = tl.constexpr(7)  # of three bits: vocabularies of up to 2^21 tokens


@triton.jit
def _read(row, start, BLOCK: tl.constexpr, IS_LIST: tl.constexpr):
    """Bit patterns of weights and ids of the next BLOCK tokens; beyond the end, weights of 0."""
    logits_ptr, bits_ptr, ids_ptr, num, best, temperature = row
    at = start + tl.arange(0, BLOCK)
    if IS_LIST:
        bits = tl.load(bits_ptr + at, mask=at < num, other=0)
        ids = tl.load(ids_ptr + at, mask=at < num, other=_LAST_ID)
    else:
        bits = weight_bits(tl.load(logits_ptr + at, mask=at < num, other=float("-inf")), best, temperature)
        ids = at
    return bits, ids


@triton.jit
def _at_least(row, pattern, BLOCK: tl.constexpr, IS_LIST: tl.constexpr):
    """Number and mass of the tokens whose weight has at least this pattern, which is not 0."""
    number, mass = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for start in range(0, row[3], BLOCK):
        bits, _ = _read(row, start, BLOCK, IS_LIST)
        number += (bits >= pattern).to(tl.int64)
        mass += tl.where(bits >= pattern, mass_of(bits), 0)
    return tl.sum(number, 0), tl.sum(mass, 0)


@triton.jit
def _find_cut(row, goal, BY_MASS: tl.constexpr, BLOCK: tl.constexpr, IS_LIST: tl.constexpr):
    """The largest pattern that tokens of this number or mass reach; 0 if all together are fewer."""
    low = tl.zeros([], tl.int32)
    for level in range(10):
        shift = 27 - 3 * level
        patterns = low + (tl.arange(0, 8) << shift)
        totals = tl.zeros([BLOCK, 8], tl.int64)
        for start in range(0, row[3], BLOCK):
            bits, _ = _read(row, start, BLOCK, IS_LIST)
            amount = mass_of(bits) if BY_MASS else (bits > 0).to(tl.int64)
            totals += tl.where(bits[:, None] >= patterns[None, :], amount[:, None], 0)
        num_reached = tl.sum((tl.sum(totals, 0) >= goal).to(tl.int32), 0)
        low += (tl.maximum(num_reached, 1) - 1) << shift
    return low


@triton.jit
def _amount(bits, ids, cut, last_id, OF_TIES: tl.constexpr):
    """1 for each token at the cut, or the mass of each token that stays."""
    if OF_TIES:
        amount = (bits == cut).to(tl.int64)
    else:
        amount = tl.where((bits > cut) | ((bits == cut) & (ids <= last_id)), mass_of(bits), 0)
    return amount


@triton.jit
def _find_id(row, goal, cut, last_id, OF_TIES: tl.constexpr, BLOCK: tl.constexpr, IS_LIST: tl.constexpr):
    """In order of id, the first token with which the sum of amounts exceeds the goal."""
    if IS_LIST:  # not in order of id, so bit by bit
        found = tl.zeros([], tl.int32)
        for level in range(_ID_LEVELS):
            shift = 3 * (_ID_LEVELS - 1 - level)
            borders = found + (tl.arange(0, 8) << shift)
            totals = tl.zeros([BLOCK, 8], tl.int64)
            for start in range(0, row[3], BLOCK):
                bits, ids = _read(row, start, BLOCK, IS_LIST)
                amount = _amount(bits, ids, cut, last_id, OF_TIES)
                totals += tl.where(ids[:, None] < borders[None, :], amount[:, None], 0)
            found += (tl.sum((tl.sum(totals, 0) <= goal).to(tl.int32), 0) - 1) << shift
    else:
        found = tl.full([], _LAST_ID, tl.int32)
        before = tl.zeros([], tl.int64)
        for start in range(0, row[3], BLOCK):
            bits, ids = _read(row, start, BLOCK, IS_LIST)
            amount = _amount(bits, ids, cut, last_id, OF_TIES)
            after = before + tl.sum(amount, 0)
            if (before <= goal) & (after > goal):
                found = start + tl.sum((before + tl.cumsum(amount, 0) <= goal).to(tl.int32), 0)
            before = after
    return found


@triton.jit
def _target(draw, total):
    """The draw, a number in [0, 1), as a place among `total` units of mass."""
    return tl.minimum((draw * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _filtered_token(row, total, top_k, top_p, min_bits, draw, BLOCK: tl.constexpr, IS_LIST: tl.constexpr):
    """A token among those that top-k, top-p and min-p leave. `total` is the mass of all tokens."""
    cut, room = tl.zeros([], tl.int32), tl.full([], _ALL, tl.int64)
    if top_k > 0:
        found = _find_cut(row, top_k, False, BLOCK, IS_LIST)
        if found > 0:
            number, mass = _at_least(row, found + 1, BLOCK, IS_LIST)
            cut, room = found, top_k - number
            total = mass + room * mass_of(found)
    if top_p < 1.0:
        goal = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
        found = _find_cut(row, goal, True, BLOCK, IS_LIST)
        if (found > 0) & (found >= cut):
            number, mass = _at_least(row, found + 1, BLOCK, IS_LIST)
            unit = mass_of(found)
            fitting = (goal - mass + unit - 1) // unit
            room = tl.where(found == cut, tl.minimum(room, fitting), fitting)
            cut = found
    if min_bits > cut:
        cut, room = min_bits, tl.full([], _ALL, tl.int64)
    cut = tl.maximum(cut, 1)  # weights of 0 have no mass
    last_id = tl.full([], _LAST_ID, tl.int32)
    num_reached, mass_reached = _at_least(row, cut, BLOCK, IS_LIST)
    num_above, mass_above = _at_least(row, cut + 1, BLOCK, IS_LIST)
    if num_reached - num_above > room:
        last_id = _find_id(row, room - 1, cut, last_id, True, BLOCK, IS_LIST)
        mass_reached = mass_above + room * mass_of(cut)
    return _find_id(row, _target(draw, mass_reached), cut, last_id, False, BLOCK, IS_LIST)


@triton.jit
def _plain_token(row, masses, draw, vocab_size, CHUNK: tl.constexpr, S_PAD: tl.constexpr):
    """A token among all, from the masses of the chunks."""
    goal = _target(draw, tl.sum(masses, 0))
    chunks = tl.arange(0, S_PAD)
    chunk = tl.sum((tl.cumsum(masses, 0) <= goal).to(tl.int32), 0)
    goal -= tl.sum(tl.where(chunks < chunk, masses, 0), 0)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(row[0] + ids, mask=ids < vocab_size, other=float("-inf"))
    masses_in_chunk = mass_of(weight_bits(x, row[4], row[5]))
    return chunk * CHUNK + tl.sum((tl.cumsum(masses_in_chunk, 0) <= goal).to(tl.int32), 0)


@triton.jit
def _list_suffices(row, num_listed, total, cut, top_k, top_p, min_bits, BLOCK: tl.constexpr, C: tl.constexpr):
    """True if every token that the filters leave is a candidate."""
    suffices = num_listed <= C
    if suffices & (cut > _LEAST_BITS):  # there are tokens with mass that are not listed
        suffices = (min_bits >= cut) & ((top_k == 0) | (top_p >= 1.0))
        if top_k > 0:
            suffices |= num_listed >= top_k
        elif top_p < 1.0:
            _, mass = _at_least(row, 1, BLOCK, True)
            suffices |= mass >= tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
    return suffices


@triton.jit
def draw_tokens(
    logits_ptr, rows_ptr, ints_ptr, floats_ptr, best_ptr, cut_ptr, masses_ptr, num_listed_ptr, listed_bits_ptr,
    listed_ids_ptr, tokens_ptr, kept_ptr, vocab_size, logits_stride, num_chunks,
    NUM_INTS: tl.constexpr, NUM_FLOATS: tl.constexpr, CHUNK: tl.constexpr, S_PAD: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One token for each drawn row. Grid: (drawn rows,). A row of -1 is none."""
    index = tl.load(rows_ptr + tl.program_id(0))
    if index < 0:
        return
    ints_ptr += index * NUM_INTS
    floats_ptr += index * NUM_FLOATS
    best, cut = tl.load(best_ptr + index), tl.load(cut_ptr + index)
    if is_finite(best):
        logits_ptr += tl.load(ints_ptr) * logits_stride
        bits_ptr, ids_ptr = listed_bits_ptr + index * C, listed_ids_ptr + index * C
        temperature = tl.load(floats_ptr).to(tl.float32)
        top_p, draw = tl.load(floats_ptr + 1), tl.load(floats_ptr + 2)
        chunks = tl.arange(0, S_PAD)
        masses = tl.load(masses_ptr + index * num_chunks + chunks, mask=chunks < num_chunks, other=0)
        whole = (logits_ptr, bits_ptr, ids_ptr, vocab_size, best, temperature)
        if tl.load(ints_ptr + 4) == _FILTERED:
            num_listed, total = tl.load(num_listed_ptr + index), tl.sum(masses, 0)
            top_k, min_bits = tl.load(ints_ptr + 7), tl.load(ints_ptr + 8).to(tl.int32)
            listed = (logits_ptr, bits_ptr, ids_ptr, tl.minimum(num_listed, C), best, temperature)
            if _list_suffices(listed, num_listed, total, cut, top_k, top_p, min_bits, BLOCK, C):
                token = _filtered_token(listed, total, top_k, top_p, min_bits, draw, BLOCK, True)
            else:
                token = _filtered_token(whole, total, top_k, top_p, min_bits, draw, BLOCK, False)
        else:
            token = _plain_token(whole, masses, draw, vocab_size, CHUNK, S_PAD)
        tl.store(tokens_ptr + index, token.to(tl.int64))
        tl.store(kept_ptr + tl.load(ints_ptr + 1), token.to(tl.int64))


@triton.jit
def _next_best(logits_ptr, ids_ptr, num, last_x, last_id, BLOCK: tl.constexpr, IS_LIST: tl.constexpr):
    """The best logit after (`last_x`, `last_id`) and its token; of equal ones the smaller id comes first."""
    best, best_id = tl.full([], float("-inf"), tl.float32), tl.full([], _LAST_ID, tl.int32)
    for start in range(0, num, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + at, mask=at < num, other=0) if IS_LIST else at
        x = tl.load(logits_ptr + ids, mask=at < num, other=float("-inf"))
        is_after = ((x < last_x) | ((x == last_x) & (ids > last_id))) & (at < num)
        here = tl.max(tl.where(is_after, x, float("-inf")), 0)
        here_id = tl.min(tl.where(is_after & (x == here), ids, _LAST_ID), 0)
        if (here > best) | ((here == best) & (here_id < best_id)):
            best, best_id = here, here_id
    return best, best_id


@triton.jit(do_not_specialize=["num_top"])
def rank_tokens(
    logits_ptr, ints_ptr, best_ptr, masses_ptr, num_listed_ptr, listed_ids_ptr, tokens_ptr, chosen_ptr,
    chosen_value_ptr, top_ptr, top_values_ptr, vocab_size, logits_stride, num_chunks, num_top,
    NUM_INTS: tl.constexpr, S_PAD: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Log-probabilities of the token that a row chose and of its `num_top` best. Grid: (rows that want them,)."""
    index = tl.program_id(0).to(tl.int64)
    source = tl.load(ints_ptr + index * NUM_INTS)
    best = tl.load(best_ptr + index)
    token = tl.maximum(tl.load(tokens_ptr + tl.load(ints_ptr + index * NUM_INTS + 1)), 0)
    tl.store(chosen_ptr + index, token)
    if is_finite(best):
        logits_ptr += source * logits_stride
        chunks = tl.arange(0, S_PAD)
        masses = tl.load(masses_ptr + index * num_chunks + chunks, mask=chunks < num_chunks, other=0)
        log_total = tl.log(tl.sum(masses, 0).to(tl.float32) * 2.0**-44)
        tl.store(chosen_value_ptr + index, tl.load(logits_ptr + token) - best - log_total)
        num_listed = tl.load(num_listed_ptr + index)
        is_short = (num_listed <= C) & (num_listed >= num_top)
        last_x, last_id = tl.full([], float("inf"), tl.float32), tl.full([], -1, tl.int32)
        for place in range(num_top):
            if is_short:
                last_x, last_id = _next_best(
                    logits_ptr, listed_ids_ptr + index * C, num_listed, last_x, last_id, BLOCK, True
                )
            else:
                last_x, last_id = _next_best(logits_ptr, listed_ids_ptr, vocab_size, last_x, last_id, BLOCK, False)
            tl.store(top_ptr + index * num_top + place, last_id.to(tl.int64))
            tl.store(top_values_ptr + index * num_top + place, last_x - best - log_total)
