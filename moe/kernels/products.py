"""One tile of weight rows times one tile of token rows, for every number format: the loop over the reduction axis.

It reads the packed layout (`layout.py`); `gemm.py` chooses the tiles and stores their sums.
Shape letters: N weight rows of a tile, M token rows of a tile, K columns of a step, W packed words of a step.
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from moe.kernels.bits import decode_e4m3, exponent_scale, fraction_scale, unpack_e2m1, unpack_e2m1_half, unpack_e4m3

BF16 = tl.constexpr(0)
FP8_BLOCK = tl.constexpr(1)
MXFP4 = tl.constexpr(2)
NVFP4 = tl.constexpr(3)
FP8_BOTH = tl.constexpr(4)  # FP8 block weights times activations in FP8, a scale per row and step


@triton.jit
def _fp4_scales(packed, HALF: tl.constexpr, FORMAT: tl.constexpr):
    """bf16 [BLOCK_N, 1] scales of the codes 0 and 1, or 2 and 3, of packed scale bytes [BLOCK_N]."""
    if FORMAT == MXFP4:
        s0, s1 = exponent_scale(packed, 2 * HALF), exponent_scale(packed, 2 * HALF + 1)
    else:
        s0, s1 = fraction_scale(packed, 2 * HALF), fraction_scale(packed, 2 * HALF + 1)
    return s0[:, None], s1[:, None]


@triton.jit
def _fp4_half(
    words, packed, HALF: tl.constexpr, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr,
    USE_ASM: tl.constexpr,
):  # fmt: skip
    """bf16 [BLOCK_N, 2 * WORDS]: the first or the second half of the columns of packed words."""
    s0, s1 = _fp4_scales(packed, HALF, FORMAT)
    w0, w1 = unpack_e2m1_half(words, s0, s1, HALF, USE_ASM)
    return tl.join(w0, w1).permute(0, 2, 1).reshape(BLOCK_N, 2 * WORDS)


@triton.jit
def _fp4_tile(words, packed, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, USE_ASM: tl.constexpr):
    """bf16 [BLOCK_N, 4 * WORDS] of packed codes [BLOCK_N, WORDS] and scale bytes [BLOCK_N]."""
    s0, s1 = _fp4_scales(packed, 0, FORMAT)
    s2, s3 = _fp4_scales(packed, 1, FORMAT)
    w0, w1, w2, w3 = unpack_e2m1(words, s0, s1, s2, s3, USE_ASM)
    tile = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [N, W, code / 2, code % 2] after the two joins
    return tile.permute(0, 2, 3, 1).reshape(BLOCK_N, 4 * WORDS)


@triton.jit
def _fp8_tile(words, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, USE_ASM: tl.constexpr):
    """bf16 [BLOCK_N, 2 * WORDS], block scales not applied."""
    w0, w1 = unpack_e4m3(words, USE_ASM)
    return tl.join(w0, w1).permute(0, 2, 1).reshape(BLOCK_N, 2 * WORDS)


@triton.jit
def _dot(w_NK, x_MK, acc_NM, INTERPRET: tl.constexpr):
    if INTERPRET:  # the interpreter multiplies the raw bits of bf16 operands
        return acc_NM + tl.dot(w_NK.to(tl.float32), tl.trans(x_MK.to(tl.float32)), input_precision="ieee")
    return tl.dot(w_NK, tl.trans(x_MK), acc_NM)


@triton.jit
def _dot_fp8(w_NK, x_MK, INTERPRET: tl.constexpr):
    if INTERPRET:
        w_NK, x_MK = w_NK.to(tl.uint8, bitcast=True), x_MK.to(tl.uint8, bitcast=True)
        return tl.dot(decode_e4m3(w_NK), tl.trans(decode_e4m3(x_MK)), input_precision="ieee")
    return tl.dot(w_NK, tl.trans(x_MK))


@triton.jit
def _load_rows(x_ptrs, is_row_M, BLOCK_M: tl.constexpr):
    """Short tiles leave out rows that stand for no slot, which spares the L2 their bytes;

    tall ones have few of them and no registers for the masks: there such rows hold numbers that nobody stores.
    """
    if BLOCK_M < 128:
        x = tl.load(x_ptrs, mask=is_row_M[:, None], other=0.0)
    else:
        x = tl.load(x_ptrs)
    return x


@triton.jit
def _activations(
    x_ptrs, is_row_M, step, num_cols,
    BLOCK_M: tl.constexpr, STEP_K: tl.constexpr, SHORT_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, STEP_K] of a step."""
    if SHORT_K:
        x = tl.load(x_ptrs, mask=is_row_M[:, None] & (tl.arange(0, STEP_K) < num_cols)[None, :], other=0.0)
    else:
        col = tl.minimum(step * STEP_K, num_cols - STEP_K)  # the last step looks back: see layout.py
        x = _load_rows(x_ptrs + col, is_row_M, BLOCK_M)
    return x


@triton.jit
def _load_weights(ptrs, BLOCK_M: tl.constexpr):
    """Evict the weights of eight-row tiles first: these tiles have few tokens, so no other tile reads the weights."""
    if BLOCK_M <= 8:
        loaded = tl.load(ptrs, eviction_policy="evict_first")
    else:
        loaded = tl.load(ptrs)
    return loaded


@triton.constexpr_function
def block_words(format_code, words):
    """Numbers of one block of 64 rows by one step, in the weights' own type: see layout.py."""
    return 64 * words + (128 if format_code in (MXFP4, NVFP4) else 0)


@triton.jit
def _weight_ptrs(
    w_ptr, expert, first_row, num_blocks, num_steps, ROWS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Pointers to step 0 of `ROWS` rows from `first_row`, a multiple of 64; and the block that each of them is in."""
    # Blocks of a step lie side by side, steps num_blocks blocks apart. The last of a tile's blocks may not exist.
    row_N = tl.arange(0, ROWS)
    block_N = tl.minimum(first_row // 64 + row_N // 64, num_blocks - 1)
    index_N = expert.to(tl.int64) * num_steps * num_blocks + block_N
    w_ptrs = w_ptr + (index_N * BLOCK + row_N % 64 * WORDS)[:, None] + tl.arange(0, WORDS)[None, :]
    return w_ptrs, index_N


@triton.jit
def _scale_ptrs(s_ptr, index_N, ROWS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to the scales of FP4 rows, which lie behind the words of their block `index_N`; int32, as `s_ptr`."""
    return s_ptr + index_N * (BLOCK // 2) + 32 * WORDS + tl.arange(0, ROWS) % 64


@triton.jit
def _load_tail(
    x_ptr_M, is_row_M, tail_ptr, expert, first_row, step_end, num_blocks, num_steps, num_cols,
    FORMAT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP_K: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Activations, words and scales of the last columns, STEP_K of them, for the part of K that ends with them.

    Words and scales of other parts are zeros.
    """
    BLOCK: tl.constexpr = block_words(FORMAT, WORDS)
    w_ptrs, index_N = _weight_ptrs(tail_ptr, expert, first_row, num_blocks, 1, BLOCK_N, WORDS, BLOCK)
    s_ptrs = _scale_ptrs(tail_ptr.to(tl.pointer_type(tl.int32)), index_N, BLOCK_N, WORDS, BLOCK)
    # Compared as a tensor: of two numbers the interpreter makes no mask.
    has_tail_N = tl.where(tl.arange(0, BLOCK_N) >= 0, step_end, 0) == num_steps
    words = tl.load(w_ptrs, mask=has_tail_N[:, None], other=0)
    scales = tl.load(s_ptrs, mask=has_tail_N, other=0)
    x_ptrs = x_ptr_M[:, None] + (num_cols - STEP_K + tl.arange(0, STEP_K))[None, :]
    return _load_rows(x_ptrs, is_row_M, BLOCK_M), words, scales


@triton.jit
def _wait_for_products():
    """Wait for this warp group's products (Hopper), which read weights from registers while later instructions run.

    PTX forbids writing these registers before such a wait. Triton up to 3.7 waits too late, and ptxas before 13.3 does
    not notice (triton-lang/triton issue 9433): the next step's weights then overwrite those of a product that is still
    running, now and then, where other work on the card delays it.
    """
    tl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def multiply(
    x_ptr_M, is_row_M, w_ptr, s_ptr, tail_ptr, expert, first_row, step_begin, step_end, num_blocks, num_steps, num_cols,
    FORMAT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP_K: tl.constexpr, WORDS: tl.constexpr,
    NUM_STAGES: tl.constexpr, SHORT_K: tl.constexpr, HAS_TAIL: tl.constexpr,
    USE_ASM: tl.constexpr, USE_WGMMA: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_N, BLOCK_M]: one tile of weight rows times one tile of token rows, bf16 or FP4 weights.

    USE_WGMMA: on Hopper, products of 16 rows and more run beside the instructions after them. A step of MXFP4 is then
    two products of half its columns: the second half is unpacked while the first is multiplied. Halves of NVFP4 steps
    would be too short to pay.
    """
    IS_ASYNC: tl.constexpr = USE_WGMMA and BLOCK_M >= 16
    IN_HALVES: tl.constexpr = IS_ASYNC and FORMAT == MXFP4 and not SHORT_K
    PRODUCT_K: tl.constexpr = STEP_K // 2 if IN_HALVES else STEP_K
    x_ptrs = x_ptr_M[:, None] + tl.arange(0, PRODUCT_K)[None, :]
    BLOCK: tl.constexpr = block_words(FORMAT, WORDS)
    w_ptrs, index_N = _weight_ptrs(w_ptr, expert, first_row, num_blocks, num_steps, BLOCK_N, WORDS, BLOCK)
    s_ptrs = _scale_ptrs(s_ptr, index_N, BLOCK_N, WORDS, BLOCK)
    # Without a promise that the loop runs, ptxas waits for every matrix instruction before it issues the next.
    tl.assume(step_end > step_begin)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    IS_EARLY: tl.constexpr = BLOCK_M <= 16  # low tiles have registers for a tail that arrives while the loop runs
    if HAS_TAIL and IS_EARLY:
        tail_x, tail_words, tail_scales = _load_tail(
            x_ptr_M, is_row_M, tail_ptr, expert, first_row, step_end, num_blocks, num_steps, num_cols,
            FORMAT, BLOCK_M, BLOCK_N, STEP_K // 2, WORDS // 2,
        )  # fmt: skip
    for step in tl.range(step_begin, step_end, num_stages=NUM_STAGES):
        x = _activations(x_ptrs, is_row_M, step, num_cols, BLOCK_M, STEP_K, SHORT_K)
        if FORMAT == BF16:
            acc = _dot(_load_weights(w_ptrs + step * (num_blocks * BLOCK), BLOCK_M), x, acc, INTERPRET)
        else:
            if IS_ASYNC and USE_ASM:
                _wait_for_products()
            words = _load_weights(w_ptrs + step * (num_blocks * BLOCK), BLOCK_M)
            scales = _load_weights(s_ptrs + step * (num_blocks * (BLOCK // 2)), BLOCK_M)
            if IN_HALVES:
                x_1 = _activations(x_ptrs + PRODUCT_K, is_row_M, step, num_cols, BLOCK_M, STEP_K, SHORT_K)
                acc = _dot(_fp4_half(words, scales, 0, FORMAT, BLOCK_N, WORDS, USE_ASM), x, acc, INTERPRET)
                acc = _dot(_fp4_half(words, scales, 1, FORMAT, BLOCK_N, WORDS, USE_ASM), x_1, acc, INTERPRET)
            else:
                acc = _dot(_fp4_tile(words, scales, FORMAT, BLOCK_N, WORDS, USE_ASM), x, acc, INTERPRET)
    if HAS_TAIL:
        if not IS_EARLY:
            tail_x, tail_words, tail_scales = _load_tail(
                x_ptr_M, is_row_M, tail_ptr, expert, first_row, step_end, num_blocks, num_steps, num_cols,
                FORMAT, BLOCK_M, BLOCK_N, STEP_K // 2, WORDS // 2,
            )  # fmt: skip
        tail = _fp4_tile(tail_words, tail_scales, FORMAT, BLOCK_N, WORDS // 2, USE_ASM)
        acc = _dot(tail, tail_x, acc, INTERPRET)
    return acc


@triton.jit
def _fp8_step(
    w_ptrs, s_ptrs, x, x_scale, acc, step, num_blocks,
    FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, WORDS: tl.constexpr,
    USE_ASM: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """acc plus one step's product times its scales."""
    scale = tl.load(s_ptrs + step * (num_blocks * 8))[:, None]
    if FORMAT == FP8_BOTH:
        part = _dot_fp8(tl.load(w_ptrs + step * (num_blocks * 64 * WORDS)), x, INTERPRET) * x_scale[None, :]
    else:
        w = _fp8_tile(_load_weights(w_ptrs + step * (num_blocks * 64 * WORDS), BLOCK_M), ROWS, WORDS, USE_ASM)
        part = _dot(w, x, tl.zeros((ROWS, BLOCK_M), dtype=tl.float32), INTERPRET)
    return acc + part * scale


@triton.jit
def multiply_fp8(
    x_ptr_M, xs_ptrs, xs_stride, is_row_M, w_ptr, s_ptr, expert, first_row, step_begin, step_end, num_blocks, num_steps,
    num_cols,
    FORMAT: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, STEP_K: tl.constexpr,
    WORDS: tl.constexpr, NUM_STAGES: tl.constexpr, SHORT_K: tl.constexpr,
    USE_ASM: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The same for FP8 blocks: PARTS (1 or 2) tiles of ROWS rows, one after the other in every step.

    Each step's product needs registers beside the sum that its scaled value is added to; a half at a time needs half.
    """
    x_ptrs = x_ptr_M[:, None] + tl.arange(0, STEP_K)[None, :]
    w0_ptrs, index_0 = _weight_ptrs(w_ptr, expert, first_row, num_blocks, num_steps, ROWS, WORDS, 64 * WORDS)
    w1_ptrs, index_1 = _weight_ptrs(w_ptr, expert, first_row + ROWS, num_blocks, num_steps, ROWS, WORDS, 64 * WORDS)
    row_8 = tl.arange(0, ROWS) % 64 // 8
    s0_ptrs, s1_ptrs = s_ptr + index_0 * 8 + row_8, s_ptr + index_1 * 8 + row_8
    tl.assume(step_end > step_begin)
    acc_0 = tl.zeros((ROWS, BLOCK_M), dtype=tl.float32)
    acc_1 = tl.zeros((ROWS, BLOCK_M), dtype=tl.float32)
    x_scale = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for step in tl.range(step_begin, step_end, num_stages=NUM_STAGES):
        x = _activations(x_ptrs, is_row_M, step, num_cols, BLOCK_M, STEP_K, SHORT_K)
        if FORMAT == FP8_BOTH:
            x_scale = tl.load(xs_ptrs + step * xs_stride)
        acc_0 = _fp8_step(
            w0_ptrs, s0_ptrs, x, x_scale, acc_0, step, num_blocks, FORMAT, ROWS, BLOCK_M, WORDS, USE_ASM, INTERPRET
        )  # fmt: skip
        if PARTS == 2:
            acc_1 = _fp8_step(
                w1_ptrs, s1_ptrs, x, x_scale, acc_1, step, num_blocks, FORMAT, ROWS, BLOCK_M, WORDS, USE_ASM, INTERPRET
            )
    return acc_0, acc_1
