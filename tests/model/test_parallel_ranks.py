"""Models divided among real processes over gloo answer as one process does; `make ranks` runs all of it.

Every kind of layout also runs in threads (`test_parallel_threads`), where a case takes no process.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model.config import ModelSettings
from model.registry import build_model
from tests.model import rank_process
from tests.model.parallel_cases import FOUR, TOLERANCE, TWO, expected, worst_error
from tests.model.parallel_checkpoints import write_checkpoint

NUM_PROMPTS = 200


def spawn(work: Callable[..., None], folder: Path, world_size: int, *arguments: Any) -> None:
    torch.multiprocessing.spawn(work, args=(str(folder), world_size, *arguments), nprocs=world_size)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.ranks)])
def test_small_models(tmp_path: Path, world_size: int) -> None:
    """Biases, sinks and MXFP4 in the one; FP8 blocks, latents and shared experts in the other."""
    kinds, layouts = ("gpt_oss", "deepseek"), TWO if world_size == 2 else FOUR
    for kind in kinds:
        write_checkpoint(kind, tmp_path / kind)
    spawn(rank_process.small_models, tmp_path, world_size, layouts)
    for kind in kinds:
        alone = build_model(tmp_path / kind, ModelSettings())
        for name, sizes in layouts.items():
            want = expected(alone, sizes.get("dp_size", 1))
            for rank in range(world_size):
                got = torch.load(tmp_path / f"{kind}-{name}-{rank}.pt")
                assert worst_error(got, want[rank // sizes.get("tp_size", 1)]) < TOLERANCE, (kind, name, rank)


@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_bundled_model_gives_the_same_text(tmp_path: Path, world_size: int) -> None:
    layouts = TWO if world_size == 2 else FOUR
    logits, answers = rank_process.greedy(
        build_model(rank_process.BUNDLED, ModelSettings()), rank_process.prompts(NUM_PROMPTS)
    )
    assert len(answers) == NUM_PROMPTS
    assert len({tuple(answer) for answer in answers}) > NUM_PROMPTS / 4, "the answers differ from each other"
    spawn(rank_process.bundled_model, tmp_path, world_size, layouts, NUM_PROMPTS)
    for name, sizes in layouts.items():
        dp_size = sizes.get("dp_size", 1)
        for rank in range(world_size):
            dp_rank = rank // sizes.get("tp_size", 1)
            own_logits, own_answers = torch.load(tmp_path / f"{name}-{rank}.pt")
            want = logits[dp_rank::dp_size]
            error = ((own_logits - want).abs().amax(1) / want.abs().amax(1)).max()
            assert error < TOLERANCE, (name, rank, float(error))
            assert own_answers == answers[dp_rank::dp_size], (name, rank)
