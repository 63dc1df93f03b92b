"""What one of several processes does in `test_parallel_ranks`; a module of its own, since every process imports it.

Each case leaves `<name>-<rank>.pt` in the folder of the meeting point.
"""

from pathlib import Path

import torch

from model.config import ModelSettings
from model.parallel import ParallelLayout
from model.registry import build_model
from tests.model.parallel_cases import run_steps

Cases = dict[str, dict[str, int]]


def small_models(rank: int, meeting: str, world_size: int, layouts: Cases) -> None:
    """Every small checkpoint in the folder, in every layout; the self-check and its round trip run while loading."""
    _join(rank, meeting, world_size)
    try:
        for folder in sorted(Path(meeting).iterdir()):
            if not folder.is_dir():
                continue
            for name, sizes in layouts.items():
                layout = ParallelLayout(**sizes, rank=rank)
                settings = ModelSettings(layout=layout, selfcheck="all")
                model = build_model(folder, settings, torch.distributed.group.WORLD)
                with torch.inference_mode():
                    logits = run_steps(model, layout, agrees=layout.tp_size > 1)
                torch.save(logits, f"{meeting}/{folder.name}-{name}-{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


def _join(rank: int, meeting: str, world_size: int) -> None:
    torch.set_num_threads(1)
    meeting_file = f"file://{meeting}/meet"
    torch.distributed.init_process_group("gloo", init_method=meeting_file, rank=rank, world_size=world_size)
