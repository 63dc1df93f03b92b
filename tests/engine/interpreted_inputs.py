"""Runs the kernel of `engine.gpu_inputs` in Triton's interpreter against torch; prints what differs, as JSON.

Ranks are processes with shared memory. The first one is late, so that the others must wait for its tokens.
"""

import json
import mmap
import sys
import time
from itertools import product

import torch

from engine.decode_inputs import DecodeInputs
from engine.gpu_inputs import spreader
from engine.step_buffers import StepBuffers
from moe.group import TokenMail
from tests.forked_ranks import sum_over_ranks

MAX_ROWS, PAGE_SIZE, SPARE_PAGE, STEPS = 5, 4, 9, 4
LAG_S = 0.02


def make_inputs(*, is_sliding: bool, counts_live: bool, max_model_len: int, mail: TokenMail | None) -> DecodeInputs:
    """On a CPU, with the interpreted kernel."""
    buffers = StepBuffers(
        max_tokens=MAX_ROWS, max_rows=MAX_ROWS, max_model_len=max_model_len, page_size=PAGE_SIZE,
        spare_page=SPARE_PAGE, is_sliding=is_sliding, counts_live=counts_live, device=torch.device("cpu"),
    )  # fmt: skip
    inputs = DecodeInputs(buffers, torch.zeros(MAX_ROWS, dtype=torch.int64), mail)
    inputs._spread = spreader(inputs._numbers, inputs._tokens_M, buffers, mail)
    return inputs


def wrong_alone() -> list[str]:
    """Layouts of which a step was filled otherwise than by torch; a step without requests is one of theirs."""
    wrong = []
    for is_sliding, counts_live, max_model_len in product((False, True), (False, True), (1, 30)):
        inputs = make_inputs(is_sliding=is_sliding, counts_live=counts_live, max_model_len=max_model_len, mail=None)
        is_right = [inputs._is_right(seed) for seed in range(STEPS)]
        inputs.send_nothing()
        inputs.spread(MAX_ROWS)
        buffers = inputs._buffers
        is_right.append(set(buffers.slots_GM.flatten().tolist()) == {SPARE_PAGE * PAGE_SIZE})
        is_right.append(set(buffers.lens_M.tolist()) == {1} and buffers.num_live in (None, torch.zeros(1)))
        wrong += [f"{is_sliding=} {counts_live=} {max_model_len=} {is_right=}"] * (not all(is_right))
    return wrong


def wrong_steps(boxes: list[torch.Tensor], rank: int) -> int:
    mail = TokenMail(tuple(each.data_ptr() for each in boxes), rank, MAX_ROWS)
    inputs = make_inputs(is_sliding=True, counts_live=False, max_model_len=30, mail=mail)
    wrong = 0
    for seed in range(STEPS):
        if rank == 0:
            time.sleep(LAG_S)
        wrong += not inputs._is_right(seed)
        if rank == 0:  # what a sum over the ranks does: the boxes are empty before they are filled again
            while any(bool(each.count_nonzero()) for each in boxes):
                time.sleep(0.001)
    return wrong


def wrong_on_ranks(num_ranks: int) -> int:
    """Wrong steps of all ranks; a rank that does not end counts all its steps."""
    boxes = [torch.frombuffer(mmap.mmap(-1, 4 * MAX_ROWS), dtype=torch.int32) for _ in range(num_ranks)]
    return sum_over_ranks(num_ranks, lambda rank: wrong_steps(boxes, rank), most=STEPS)


def main() -> None:
    json.dump({"alone": wrong_alone(), "ranks": [wrong_on_ranks(2), wrong_on_ranks(3)]}, sys.stdout)


if __name__ == "__main__":
    main()
