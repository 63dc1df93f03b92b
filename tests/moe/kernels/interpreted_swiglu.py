"""Runs `masked_swiglu` in Triton's interpreter, on the CPU, and prints by case what is wrong, as JSON."""

import json
import sys

import torch

from moe import Activation
from moe.formats.token_groups import dequantize_token_groups, unpack_ue8m0
from moe.kernels.masked_swiglu import masked_swiglu, masked_swiglu_kernel
from moe.layouts.deep_gemm import swiglu_reference
from tests.moe.kernels.watched import fails_with, watch

WATCH = watch(masked_swiglu_kernel)
DEEPSEEK_V4, GPT_OSS = Activation(limit=10.0), Activation(alpha=1.702, beta=1.0, limit=7.0)


def decoded(result: tuple[torch.Tensor, torch.Tensor], inter: int) -> torch.Tensor:
    codes, scales = result
    if scales.dtype == torch.int32:
        scales = unpack_ue8m0(scales, inter // 128)
    return dequantize_token_groups(codes, scales)


def compare(counts: list[int], num_rows: int, inter: int, activation: Activation, ue8m0: bool) -> str:
    """Empty if live rows equal the reference and nothing else was written."""
    g = torch.Generator().manual_seed(num_rows + inter)
    h = (torch.randn(len(counts), num_rows, 2 * inter, generator=g) * 6).bfloat16()
    h[0, 0, :128] = 0.0  # a group of zeros
    counts_E = torch.tensor(counts, dtype=torch.int32)
    for expert, count in enumerate(counts):
        h[expert, count:] = float("nan")
    got, want = (run(h, counts_E, activation, ue8m0=ue8m0) for run in (masked_swiglu, swiglu_reference))
    for part, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            return f"{part}: {ours.dtype} {tuple(ours.shape)}, not {theirs.dtype} {tuple(theirs.shape)}"
    if num_rows > 1 and (got[1].stride(-2) != 1 or got[1].stride(-1) % 4 or got[1].stride(-1) < num_rows):
        return f"scales have strides {got[1].stride()}"
    is_live = torch.arange(num_rows) < counts_E[:, None]
    if not (decoded(got, inter)[~is_live].isnan() | (got[0].view(torch.uint8)[~is_live] == 0x7F)).all():
        return "a row past the count was written"
    scale, want_scale = (int(part[1][0, 0, 0]) & 0xFF if ue8m0 else float(part[1][0, 0, 0]) for part in (got, want))
    if counts[0] and (scale != want_scale or got[0][0, 0, :128].float().any()):
        return f"a group of zeros has the scale {scale}, not {want_scale}, or codes other than 0"
    num_last = inter // 128 % 4  # groups in the last word
    if ue8m0 and num_last and (got[1][is_live][:, -1] >> (8 * num_last)).any():
        return "bytes past the last group are not 0"
    live_got, live_want = decoded(got, inter)[is_live], decoded(want, inter)[is_live]
    error = float((live_got - live_want).norm() / live_want.norm().clamp_min(1e-30))
    same = float((got[0].float()[is_live] == want[0].float()[is_live]).float().mean())
    if any(counts) and not (error < 2e-3 and same > 0.99):
        return f"error {error:.2g}, {same:.4f} of the codes are the same"
    return ""


def reads_no_row_past_the_count() -> str:
    """The tensors end with the last live row, in the middle of a block of rows; the watch raises beyond."""
    h, scale = torch.ones(1, 5, 512).bfloat16(), torch.empty(1, 2, 16)
    q = torch.empty(1, 16, 256, dtype=torch.uint8)

    def run(count: int) -> None:
        masked_swiglu_kernel[(1, 1, 2)](
            h, torch.tensor([count], dtype=torch.int32), q, scale, 5, 2, 16, 1.0, 0.0, 0.0,
            HAS_LIMIT=False, UE8M0=False, GROUP=128, BLOCK_R=16, USE_CAST=False,
        )  # fmt: skip

    run(5)
    return "" if fails_with("WrongAccessError", lambda: run(6)) else "the watch sleeps"


CASES = {
    "fp32 scales": lambda: compare([3, 0, 17, 32], 32, 256, DEEPSEEK_V4, False),
    "fp32 scales, odd rows": lambda: compare([5, 7], 7, 128, Activation(), False),
    "packed exponents": lambda: compare([3, 0, 17, 20], 20, 512, DEEPSEEK_V4, True),
    "packed exponents, words not full": lambda: compare([1, 18], 20, 640, Activation(), True),
    "gpt-oss": lambda: compare([2, 4], 4, 128, GPT_OSS, False),
    "one run of rows": lambda: compare([128], 128, 128, DEEPSEEK_V4, False),
    "nobody": lambda: compare([0, 0, 0], 8, 128, DEEPSEEK_V4, False),
    "no row past the count is read": reads_no_row_past_the_count,
}

if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)  # and so what `torch.empty` returns is NaN
    json.dump({name: case() for name, case in CASES.items()}, sys.stdout)
