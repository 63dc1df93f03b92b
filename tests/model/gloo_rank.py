"""What one of two processes does in `test_gloo_ranks`; a module of its own, since it is imported by every process."""

from pathlib import Path

import torch

from model.config import ModelSettings
from model.decoder import Model
from model.registry import build_model
from moe import RankPlace
from tests.model.paged import PagedCache, run

KINDS = ("gpt_oss", "deepseek")  # biases in the one, shared experts in the other
SPLITS = {"tp": {"tp_size": 2}, "ep": {"ep_size": 2}}


def logits_of(model: Model) -> torch.Tensor:
    cache = PagedCache(model.kv_specs)
    with torch.inference_mode():
        return run(model, cache.batch({"a": [3, 1, 4, 1, 5, 9, 2, 6], "b": [7, 8]}, all_logits=True), cache.layers)


def rank_process(rank: int, folder: str) -> None:
    """Build and run every model on this rank; the self-check and its round trip run while loading."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        for kind in KINDS:
            for name, sizes in SPLITS.items():
                place = RankPlace(**sizes, **{name + "_rank": rank})
                settings = ModelSettings(place=place, selfcheck="all")
                model = build_model(Path(folder) / kind, settings, torch.distributed.group.WORLD)
                torch.save(logits_of(model), f"{folder}/{kind}-{name}-{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()
