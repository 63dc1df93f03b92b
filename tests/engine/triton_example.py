"""A Triton kernel for `test_compile_watch`: Triton reads its source, so it needs a file."""

import triton
import triton.language as tl


@triton.jit
def double(x, BLOCK: tl.constexpr):
    """Twice each of `BLOCK` numbers, in place."""
    offsets = tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets) * 2)
