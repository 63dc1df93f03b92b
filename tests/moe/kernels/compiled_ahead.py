"""Kernels compiled ahead for a GPU that is not there. Prints JSON: what was logged, compiled and launched, and when.

A program of its own, since Triton's driver, listener and cache are those of the process.
"""

import json
import logging
import sys
from typing import Any

import torch
import triton
import triton.language as tl

from moe.kernels.compile_ahead import compile_ahead, launch
from tests.moe.kernels import fake_gpu


@triton.jit
def scale(x_ptr, factor, BLOCK: tl.constexpr):
    """Multiply `BLOCK` numbers, in place."""
    offsets = tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) * factor)


@triton.jit
def may_be_broken(x_ptr, IS_BROKEN: tl.constexpr):
    """Cannot be compiled if it is broken."""
    if IS_BROKEN:
        tl.static_assert(False, "broken on purpose")
    tl.store(x_ptr, 1.0)


def main() -> dict[str, Any]:
    """Six launches of four kernels, then the same with one that cannot be compiled, then code that fails."""
    fake_gpu.install()
    lines: list[str] = []
    logger = logging.getLogger("moe.kernels.compile_ahead")
    logger.addFilter(lambda record: lines.append(record.getMessage()) or False)
    logger.setLevel(logging.INFO)
    compiled: list[str] = []
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: compiled.append(f"{src.name} {cache_hit}")
    numbers, device = torch.ones(128), torch.device("cuda")
    told: dict[str, Any] = {}

    def note(name: str) -> None:
        told[name] = {"compiled": sorted(compiled), "launched": list(fake_gpu.launched), "lines": list(lines)}
        for seen in (compiled, fake_gpu.launched, lines):
            seen.clear()

    def run() -> None:
        for factor in (16, 32, 3, 5):  # two kernels: a factor that is a multiple of 16, and one that is not
            launch(scale, (1,))(numbers, factor, BLOCK=64)
        launch(scale, (1,))(numbers, 3, BLOCK=64, num_warps=8)
        launch(scale, (1,))(numbers[1:], 3, BLOCK=64)  # not aligned

    compile_ahead("a CPU", run, torch.device("cpu"))
    note("cpu")
    compile_ahead("a start", run, device)
    note("ahead")
    run()
    note("real")

    def fail() -> None:
        launch(may_be_broken, (1,))(numbers, IS_BROKEN=True)
        launch(may_be_broken, (1,))(numbers, IS_BROKEN=False)
        raise RuntimeError("out of memory")

    compile_ahead("a bad start", fail, device)
    note("failed")
    launch(may_be_broken, (1,))(numbers, IS_BROKEN=False)
    try:
        launch(may_be_broken, (1,))(numbers, IS_BROKEN=True)
    except Exception as error:
        told["error"] = type(error).__name__
    note("real after failure")
    return told


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
