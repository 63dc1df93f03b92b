"""Two real processes share the experts: every rank's logits equal those of one process, sums reduced once (B40)."""

from pathlib import Path

import pytest
import torch

from model.config import ModelSettings
from model.registry import build_model
from tests.model.checkpoints import make_deepseek, make_gpt_oss, pack_mxfp4, state_by_file_name, write
from tests.model.gloo_rank import KINDS, SPLITS, logits_of, rank_process


def test_two_processes_equal_one(tmp_path: Path) -> None:
    for kind, make in zip(KINDS, (make_gpt_oss, make_deepseek), strict=True):
        folder = tmp_path / kind
        folder.mkdir()
        tensors = state_by_file_name(make(), folder)
        if kind == "gpt_oss":
            write(folder, pack_mxfp4(tensors)[0], {"quantization_config": {"quant_method": "mxfp4"}})
        else:
            write(folder, tensors)
    torch.multiprocessing.spawn(rank_process, args=(str(tmp_path),), nprocs=2)
    for kind in KINDS:
        want = logits_of(build_model(tmp_path / kind, ModelSettings()))
        for name in SPLITS:
            for rank in range(2):
                got = torch.load(tmp_path / f"{kind}-{name}-{rank}.pt")
                assert float((got - want).norm() / want.norm()) == pytest.approx(0, abs=1e-5), (kind, name, rank)
