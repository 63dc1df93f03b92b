"""Models divided among real processes over gloo answer as one process does; `make ranks` runs all of it.

Every kind of layout also runs in threads (`test_parallel_threads`), where a case takes no process. The bundled model on
several ranks answers through the whole service: `tests/server/test_ranks_matrix.py`.
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
