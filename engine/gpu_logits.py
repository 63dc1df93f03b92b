"""Triton kernels that change logits in place: penalties, masks, bias; and the token counts that penalties need.

`engine.gpu_sampler` launches them. They do what `engine.logits` does with torch operators, on all rows at once.

Shape letters: L rows of logits, V vocabulary, M places of running requests. A row is read in chunks of CHUNK tokens.
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"

import triton
import triton.language as tl

IN_PROMPT = -(2**31)
"""Sign bit of a count in the table: the token stands in the prompt. The other 31 bits count generated tokens."""

_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def clear_counts(places_ptr, counts_ptr, vocab_size, CHUNK: tl.constexpr):
    """Set whole rows of the table to zero. Grid: (places, chunks of the vocabulary)."""
    place = tl.load(places_ptr + tl.program_id(0))
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    tl.store(counts_ptr + place * vocab_size + ids, tl.zeros([CHUNK], tl.int32), mask=ids < vocab_size)


@triton.jit(do_not_specialize=["num_entries"])
def add_counts(entries_ptr, counts_ptr, vocab_size, num_entries, in_prompt, BLOCK: tl.constexpr):
    """Count tokens: entries are `(place << 32) + 2 * id + is_prompt`. Grid: blocks of entries."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = at < num_entries
    entries = tl.load(entries_ptr + at, mask=is_entry, other=0)
    cells = counts_ptr + (entries >> 32) * vocab_size + ((entries & 0xFFFFFFFF) >> 1)
    is_prompt = (entries & 1) != 0
    tl.atomic_or(cells, tl.zeros([BLOCK], tl.int32) + in_prompt, mask=is_entry & is_prompt)
    tl.atomic_add(cells, tl.full([BLOCK], 1, tl.int32), mask=is_entry & ~is_prompt)


@triton.jit
def penalize_and_mask(
    logits_ptr, rows_ptr, ints_ptr, floats_ptr, counts_ptr, masks_ptr, vocab_size, logits_stride,
    NUM_INTS: tl.constexpr, NUM_FLOATS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Penalties and masks of the rows listed in `rows_ptr`. NaN and infinity stay, so that a broken row stays broken.

    Grid: (listed rows, chunks).
    """
    row = tl.load(rows_ptr + tl.program_id(0))
    ints_ptr += row * NUM_INTS
    floats_ptr += row * NUM_FLOATS
    source, place, has_penalties, mask_start = (
        tl.load(ints_ptr), tl.load(ints_ptr + 1), tl.load(ints_ptr + 2), tl.load(ints_ptr + 3)
    )  # fmt: skip
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    is_token = ids < vocab_size
    cells = logits_ptr + source * logits_stride + ids
    x = tl.load(cells, mask=is_token, other=0.0)
    if has_penalties != 0:
        repetition = tl.load(floats_ptr + 3).to(tl.float32)
        count = tl.load(counts_ptr + place * vocab_size + ids, mask=is_token, other=0)
        num_generated = count & 0x7FFFFFFF
        if repetition != 1.0:
            scaled = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
            is_finite = x < float("inf")  # dividing may make an infinity of a number, and must not
            scaled = tl.where(is_finite & (scaled > _LARGEST), _LARGEST, scaled)
            x = tl.where(count != 0, scaled, x)
        x -= tl.load(floats_ptr + 4).to(tl.float32) * num_generated.to(tl.float32)
        x -= tl.where(num_generated > 0, tl.load(floats_ptr + 5).to(tl.float32), 0.0)
    if mask_start >= 0:
        byte = tl.load(masks_ptr + mask_start + ids // 8, mask=is_token, other=0).to(tl.int32)
        x += tl.where(((byte >> (ids % 8)) & 1) != 0, 0.0, float("-inf"))
    tl.store(cells, x, mask=is_token)


@triton.jit(do_not_specialize=["num_entries"])
def add_bias(logits_ptr, entries_ptr, values_ptr, logits_stride, num_entries, BLOCK: tl.constexpr):
    """Add values to single logits: entries are `(row of logits << 32) + id`, each once. Grid: blocks of entries."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = at < num_entries
    entries = tl.load(entries_ptr + at, mask=is_entry, other=0)
    cells = logits_ptr + (entries >> 32) * logits_stride + (entries & 0xFFFFFFFF)
    x = tl.load(cells, mask=is_entry, other=0.0)
    tl.store(cells, x + tl.load(values_ptr + at, mask=is_entry, other=0.0).to(tl.float32), mask=is_entry)
