"""Runs `sum_norm` in Triton's interpreter on ranks that are processes with shared memory; prints wrong rounds as JSON.

A rank in turn is late in each round: the others must wait for its part. Places alternate, and the number of rows
changes, as in steps that follow each other. The planted faults show that a wrong order would be seen.
"""

import json
import mmap
import sys
import time

import torch

from moe.kernels.sum_norm import SumNorm
from tests.forked_ranks import sum_over_ranks

ROUNDS, HIDDEN, MOST_ROWS, MAX_RANKS = 12, 100, 4, 4
PART = MOST_ROWS * HIDDEN * 4  # bytes; fp32 and fp16 alike
FLAGS = MOST_ROWS * MAX_RANKS * 4
LAG_S = 0.03
CPU = torch.device("cpu")


def tensors(step: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x, the same on all ranks, and a rank's part."""
    g = torch.Generator().manual_seed(step)
    num_rows = 1 + (3 * step) % MOST_ROWS
    x = torch.randn(num_rows, 2 * HIDDEN, generator=g).to(dtype)[:, :HIDDEN]
    part = torch.randn(num_rows, HIDDEN, generator=g.manual_seed(1000 + 10 * step + rank)).to(dtype)
    return x, part


def wrong_rounds(memory: list[torch.Tensor], rank: int, dtype: torch.dtype, fault: str) -> int:
    num_ranks, wrong = len(memory), 0
    weight, eps = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(5)), 1e-3
    bases = [each.data_ptr() for each in memory]
    kernels = [
        SumNorm([b + place * PART for b in bases], [b + 2 * PART + place * FLAGS for b in bases], rank, MAX_RANKS, CPU)
        for place in range(2)
    ]
    for step in range(ROUNDS):
        place = step % 2
        x, part = tensors(step, rank, dtype)
        if step % num_ranks == rank:
            time.sleep(LAG_S)
        written = 1 - place if fault == "wrong place" and rank == 1 else place
        memory[rank][written * PART : written * PART + part.nbytes].view(dtype).copy_(part.flatten())
        if fault == "no wait":
            memory[rank][2 * PART :].view(torch.int32).fill_(1)
        own = None if step % 5 == 4 else x
        summed, normed = kernels[place](own, part, weight, eps)
        total = torch.stack([tensors(step, other, dtype)[1].float() for other in range(num_ranks)]).sum(0).to(dtype)
        want = total if own is None else own + total
        want_normed = torch.nn.functional.rms_norm(want.float(), (HIDDEN,), weight, eps).to(dtype)
        is_close = torch.allclose(normed, want_normed, rtol=2e-6 if dtype == torch.float32 else 2e-3, atol=1e-6)
        wrong += not (torch.equal(summed, want) and is_close)
    return wrong


def total_of_ranks(num_ranks: int, dtype: torch.dtype, fault: str = "") -> int:
    """Wrong rounds of all ranks; a rank that does not end counts all its rounds."""
    memory = [torch.frombuffer(mmap.mmap(-1, 2 * (PART + FLAGS)), dtype=torch.uint8) for _ in range(num_ranks)]
    wrong = sum_over_ranks(num_ranks, lambda rank: wrong_rounds(memory, rank, dtype, fault), most=ROUNDS)
    left = sum(int(each[2 * PART :].view(torch.int32).count_nonzero()) for each in memory)
    return wrong + (left if not fault else 0)


def main() -> None:
    found = {
        "two ranks": total_of_ranks(2, torch.float32),
        "two ranks, fp16": total_of_ranks(2, torch.float16),
        "three ranks": total_of_ranks(3, torch.float32),
        "no wait": total_of_ranks(2, torch.float32, "no wait"),
        "wrong place": total_of_ranks(2, torch.float32, "wrong place"),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
