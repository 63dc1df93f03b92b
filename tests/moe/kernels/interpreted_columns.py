"""Runs `columns` in Triton's interpreter on ranks that are processes with shared memory; prints wrong rounds as JSON.

A rank in turn is late in each round: the others must wait for its columns. Between two rounds the ranks meet, as in a
step, which begins with a sum over them.
"""

import json
import mmap
import sys
import time

import torch

from moe.kernels.columns import GatherColumns
from tests.forked_ranks import sum_over_ranks

ROUNDS, BLOCK, MOST_ROWS, MOST_BLOCKS, MAX_RANKS = 8, 32, 3, 3, 4
FLAGS = MOST_ROWS * MOST_BLOCKS * MAX_RANKS * 4
LAG_S = 0.03
CPU = torch.device("cpu")


def columns(step: int, rank: int, num_ranks: int) -> tuple[torch.Tensor, int, int]:
    """A rank's columns, the width, and how many columns all ranks have."""
    num_rows, width = 1 + step % MOST_ROWS, (BLOCK, 2 * BLOCK + 7, 5)[step % 3]
    num_columns = num_ranks * width - (step % 2) * (width + 2)  # the last ranks have fewer or none
    num_own = max(0, min(width, num_columns - rank * width))
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(num_rows, num_own, generator=g), width, num_columns


def wrong_rounds(memory: list[torch.Tensor], rank: int, fault: str) -> int:
    num_ranks, wrong = len(memory), 0
    bases = [each.data_ptr() for each in memory]
    kernel = GatherColumns([base + 2 * FLAGS for base in bases], bases, rank, MAX_RANKS, BLOCK, CPU)
    met = [each[FLAGS : FLAGS + 4].view(torch.int32) for each in memory]
    for step in range(ROUNDS):
        if step % num_ranks == rank:
            time.sleep(LAG_S)
        if fault == "no wait":
            memory[rank][:FLAGS].view(torch.int32).fill_(1)
        own, width, num_columns = columns(step, rank, num_ranks)
        out = torch.full((own.shape[0], num_columns + 8), float("nan"))[:, :num_columns]
        kernel(own, out, width)
        wrong += not torch.equal(out, torch.cat([columns(step, other, num_ranks)[0] for other in range(num_ranks)], 1))
        met[rank].fill_(step + 1)
        while min(int(each) for each in met) <= step:
            time.sleep(0.001)
    return wrong


def total_of_ranks(num_ranks: int, fault: str = "") -> int:
    """Wrong rounds of all ranks; a rank that does not end counts all its rounds."""
    size = 2 * FLAGS + 4 * MOST_ROWS * MOST_BLOCKS * BLOCK * MAX_RANKS
    memory = [torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8) for _ in range(num_ranks)]
    wrong = sum_over_ranks(num_ranks, lambda rank: wrong_rounds(memory, rank, fault), most=ROUNDS)
    left = sum(int(each[:FLAGS].count_nonzero()) for each in memory)
    return wrong + (left if not fault else 0)


def main() -> None:
    found = {
        "two ranks": total_of_ranks(2), "three ranks": total_of_ranks(3), "no wait": total_of_ranks(2, "no wait"),
    }  # fmt: skip
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
