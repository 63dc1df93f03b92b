"""What one of several processes does in `test_parallel_ranks`; a module of its own, since every process imports it.

Each case leaves `<name>-<rank>.pt` in the folder of the meeting point.
"""

import dataclasses
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer

from model.config import ModelSettings
from model.decoder import Model
from model.parallel import ParallelLayout
from model.registry import build_model
from tests.model.paged import PagedCache, run
from tests.model.parallel_cases import run_steps

ROOT = Path(__file__).parents[2]
BUNDLED = ROOT / "assets" / "tiny-gpt-oss"
NUM_TOKENS = 12
_PREFILL = 25  # prompts of a step
_EVALS = ("facts", "addition", "sorting", "definitions")

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


def bundled_model(rank: int, meeting: str, world_size: int, layouts: Cases, num_prompts: int) -> None:
    """The bundled model answers its share of the prompts greedily."""
    _join(rank, meeting, world_size)
    try:
        for name, sizes in layouts.items():
            layout = ParallelLayout(**sizes, rank=rank)
            model = build_model(BUNDLED, ModelSettings(layout=layout), torch.distributed.group.WORLD)
            own = prompts(num_prompts)[layout.dp_rank :: layout.dp_size]
            torch.save(greedy(model, own), f"{meeting}/{name}-{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


def prompts(count: int) -> list[list[int]]:
    """Ids of questions from the evals, of many lengths."""
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    texts = []
    for name in _EVALS:
        with (ROOT / "evals" / "data" / f"{name}.jsonl").open() as lines:
            texts += [json.loads(next(lines))["messages"][0]["content"] for _ in range(count // len(_EVALS))]
    return [tokenizer.encode(text).ids for text in texts]


@torch.inference_mode()
def greedy(model: Model, own: list[list[int]]) -> tuple[torch.Tensor, list[list[int]]]:
    """Logits after each prompt, and the tokens that follow it. All ranks take the same number of steps."""
    cache = PagedCache(model.kv_specs, num_pages=16 * len(own))
    logits, answers = [], []
    for first in range(0, len(own), _PREFILL):
        batch = {str(index): own[index] for index in range(first, min(first + _PREFILL, len(own)))}
        logits.append(run(model, cache.batch(batch), cache.layers))
    answers = [[token] for token in torch.cat(logits).argmax(1).tolist()]
    for _ in range(NUM_TOKENS - 1):
        batch = dataclasses.replace(
            cache.batch({str(index): answer[-1:] for index, answer in enumerate(answers)}), max_rank_tokens=len(own)
        )
        chosen = run(model, batch, cache.layers).argmax(1).tolist()
        for answer, token in zip(answers, chosen, strict=True):
            answer.append(token)
    return torch.cat(logits), answers


def _join(rank: int, meeting: str, world_size: int) -> None:
    torch.set_num_threads(1)
    meeting_file = f"file://{meeting}/meet"
    torch.distributed.init_process_group("gloo", init_method=meeting_file, rank=rank, world_size=world_size)
