"""Parts of the kernels alone in Triton's interpreter: which slots a program finds, which addresses it forms.

Importing this needs the interpreter, and lets the watch begin. Cases give 0, or infinity where a part is wrong.
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from moe.kernels.gemm import _expert_slots, _token_slots, prefetch_weights
from moe.kernels.group import group_slots
from moe.kernels.launch import max_tiles
from moe.kernels.products import _weight_ptrs
from moe.kernels.quantize import quantize_rows
from tests.moe.kernels.watched import fails_with, watch

BLOCK = 64 * 16 + 128  # words of a block in NVFP4


@triton.jit
def count_slots(
    ids_ptr, counts_ptr, rows_ptr, num_tokens, first_expert, num_experts,
    TOPK: tl.constexpr, SLOTS_PAD: tl.constexpr, BY_EXPERT: tl.constexpr,
):  # fmt: skip
    """What each candidate has to compute, and the slot of each token's row where tokens have one."""
    candidate = tl.program_id(0)
    if SLOTS_PAD == 0:
        _, slot_M, count = _token_slots(
            ids_ptr, candidate, num_tokens, first_expert, num_experts, TOPK, 4, 8, BY_EXPERT
        )
        tl.store(rows_ptr + candidate * 8 + tl.arange(0, 8), slot_M)
    else:
        _, _, count = _expert_slots(
            ids_ptr, candidate, num_tokens * TOPK, first_expert, num_experts, SLOTS_PAD, BY_EXPERT
        )
    tl.store(counts_ptr + candidate, count)


def one_candidate_speaks_for_an_expert() -> float:
    """0 if of the candidates for a local expert one, and no other, computes all that is its own; else infinite."""
    ids = torch.tensor([3, 1, -1, 3, 4, 5, 1, 3, 0, 5, 4, -1], dtype=torch.int32)  # experts 2, 3 and 4 are local
    behind = torch.tensor([3, 4, 2], dtype=torch.int32).repeat(4)  # of a longer batch before
    ids = torch.cat((ids, behind))[: len(ids)]
    got = []
    for slots_pad in (0, 16):
        for by_expert in (False, True):
            counts, rows = (torch.full((size,), -7, dtype=torch.int32) for size in (12, 96))
            num = 3 if by_expert else 12
            count_slots[(num,)](ids, counts, rows, 4, 2, 3, TOPK=3, SLOTS_PAD=slots_pad, BY_EXPERT=by_expert)
            got.append(counts[:num].tolist())
            if slots_pad == 0:
                got.append(rows.view(-1, 8)[1 if by_expert else 0].tolist())
    rows_of_3 = [0, 3, 7, -1, -1, -1, -1, -1]
    by_slot = [[amount if slot == first else 0 for slot in range(12)] for first, amount in ((0, 1), (0, 3))]
    by_slot[0][4], by_slot[1][4] = 1, 2
    want = [by_slot[0], rows_of_3, [0, 1, 1], rows_of_3, by_slot[1], [0, 3, 2]]
    return 0.0 if got == want else float("inf")


@triton.jit
def far_block(w_ptr, first_ptr, expert, num_blocks, num_steps):
    """How far from `w_ptr` the block of an expert's row 64 is, in bytes."""
    w_ptrs, _ = _weight_ptrs(w_ptr, tl.load(expert), 64, num_blocks, num_steps, 64, 16, 64 * 16 + 128)
    tl.store(first_ptr, tl.min(tl.min(w_ptrs.to(tl.int64), axis=1)) - w_ptr.to(tl.int64))


@triton.jit
def fetch_blocks(w_ptr, expert, num_blocks, num_steps):
    """The prefetch of the second of three parts, in tiles of two blocks of which the last has one."""
    prefetch_weights(w_ptr, tl.load(expert), 1, 1, 3, num_blocks, num_steps, 128, 64 * 16 + 128, 4)


def fetched(data: torch.Tensor, expert: int, num_blocks: int, num_steps: int) -> list[float]:
    """Numbers of the blocks that `fetch_blocks` asks for."""
    fetch_blocks[(1,)](data, torch.tensor([expert], dtype=torch.int32), num_blocks, num_steps)
    places = sorted((address - data.data_ptr()) / (2 * BLOCK) for address in WATCH.prefetched)
    WATCH.prefetched.clear()
    return places


def weights_beyond_32_bits() -> float:
    """0 if the last expert of a large layer in NVFP4 is found, and its first blocks are fetched; else infinite."""
    num_blocks, num_steps, expert = 64, 160, 255
    first, data = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int16)
    data = data.expand((expert + 1) * num_steps * num_blocks * BLOCK)  # addresses without memory
    far_block[(1,)](data, first, torch.tensor([expert], dtype=torch.int32), num_blocks, num_steps)
    is_found = first.item() == 2 * BLOCK * (expert * num_steps * num_blocks + 1)
    want = [(expert * num_steps + 53 + step) * num_blocks + part for step in range(4) for part in (2, 3)]
    return 0.0 if is_found and fetched(data, expert, num_blocks, num_steps) == want else float("inf")


def first_blocks_are_fetched() -> float:
    """0 if just the blocks that a tile's loop reads first are fetched early; else infinite."""
    data = torch.zeros(2 * 8 * 3 * BLOCK, dtype=torch.int16)
    return 0.0 if fetched(data, 1, 3, 8) == [(8 + step) * 3 + 2 for step in (2, 3, 4)] else float("inf")


@triton.jit
def read_one_more(x_ptr, out_ptr):
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, 8))))


def reads_beyond_the_end_are_seen() -> float:
    """0 if the watch is awake."""
    x = torch.zeros(8)
    return 0.0 if fails_with("WrongAccessError", lambda: read_one_more[(1,)](x[:7], x.new_empty(1))) else float("inf")


@triton.jit
def double(x_ptr, out_ptr):
    tl.store(out_ptr, tl.load(x_ptr) * 2)


def overflows_are_seen() -> float:
    """0 if just a product beyond 32 bits ends the case."""
    x = torch.tensor([2**30 - 1, 2**30], dtype=torch.int32)
    double[(1,)](x, x[:1])
    is_seen = fails_with("overflow", lambda: double[(1,)](x[1:], x[1:]))
    return 0.0 if is_seen and x.tolist() == [2**31 - 2, 2**30] else float("inf")


def group_in_chunks() -> float:
    """0 if slots that are read in many chunks are sorted and cut into tiles as in one; else infinite."""
    ids = torch.randint(-1, 6, (20, 5), generator=torch.Generator().manual_seed(0)).int()
    first, local, block_m = 2, 3, 8
    num_tiles = max_tiles(ids.numel(), local, block_m)
    slots, tiles = torch.full((ids.numel(),), -1).int(), torch.full((num_tiles, 3), -7).int()
    group_slots[(local,)](
        ids, slots, tiles, ids.numel(), num_tiles, first, local, BLOCK_M=block_m, EXPERTS_PAD=4, CHUNK=16,
        USE_PDL=False,
    )  # fmt: skip
    want_slots, want_tiles = [], []
    for expert in range(local):
        start = len(want_slots)
        want_slots += (ids.flatten() == first + expert).nonzero().flatten().tolist()
        want_tiles += [[expert, begin, len(want_slots)] for begin in range(start, len(want_slots), block_m)]
    want_tiles += [[-1, 0, 0]] * (num_tiles - len(want_tiles))
    is_right = slots[: len(want_slots)].tolist() == want_slots and tiles.tolist() == want_tiles
    return 0.0 if is_right else float("inf")


def rows_without_numbers() -> float:
    """0 if rows of zeros, and slots without a token, have bytes of 0 and a scale of 1; else infinite."""
    x = torch.tensor([0.0, 1.0, float("nan"), 0.0]).bfloat16()[:, None].repeat(1, 128)
    ids = torch.tensor([0, 1, -1, 2], dtype=torch.int32)
    codes, scales = torch.full((4, 128), 7, dtype=torch.uint8), torch.full((1, 4), -7.0)
    quantize_rows[(1, 1)](
        x, ids, codes, scales, 4, 128, 128, 1, BY_SLOT=True, STEP_K=128, BLOCK_R=4, SHORT_K=False, USE_CAST=False,
        USE_PDL=False,
    )  # fmt: skip
    want = torch.tensor([1.0, 1 / 448, 1.0, 1.0])
    is_right = torch.equal(scales[0], want) and codes.tolist() == [[byte] * 128 for byte in (0, 0x7E, 0, 0)]
    return 0.0 if is_right else float("inf")


WATCH = watch(count_slots, far_block, fetch_blocks, read_one_more, double)
PARTS = {
    "grouping in chunks": group_in_chunks,
    "rows without numbers": rows_without_numbers,
    "one candidate speaks for an expert": one_candidate_speaks_for_an_expert,
    "weights beyond 32 bits": weights_beyond_32_bits,
    "first blocks are fetched": first_blocks_are_fetched,
    "reads beyond the end are seen": reads_beyond_the_end_are_seen,
    "overflows are seen": overflows_are_seen,
}
