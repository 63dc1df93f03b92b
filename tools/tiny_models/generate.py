"""Greedy or sampled writing for many prompts at once, for the trainer's own evaluation."""

from __future__ import annotations

import torch
from torch import Tensor

from tools.tiny_models.attend import CachedAttend, DenseAttend
from tools.tiny_models.families.base import Family, Weights, logits

SCORES = 64 * 2**20  # positions squared, times rows: the scores of eight heads take 2 GB


def choose(scores_BV: Tensor, temperature: float) -> Tensor:
    if temperature == 0:
        return scores_BV.argmax(-1)
    return torch.multinomial((scores_BV / temperature).softmax(-1), 1).squeeze(-1)


@torch.no_grad()
def write(
    family: Family, weights: Weights, prompts: list[list[int]], *, stop: set[int], max_new: int = 240,
    temperature: float = 0.0, dtype: torch.dtype = torch.float32,
) -> list[list[int]]:  # fmt: skip
    """The new ids for each prompt, the stop id included where it was reached."""
    device = weights["lm_head.weight"].device
    length = max(map(len, prompts))
    capacity = length + max_new
    cos, sin = (table[None, None] for table in family.rope_tables(capacity, device))
    ids = torch.zeros(len(prompts), length, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
    ends = torch.tensor([len(prompt) for prompt in prompts], device=device)
    cache = CachedAttend(family.shape, len(prompts), capacity, device, dtype)
    cache.positions_BL = torch.arange(length, device=device).expand(len(prompts), -1).contiguous()
    states, _ = family.hidden_states(weights, ids, (cos[:, :, :length], sin[:, :, :length]), cache, dtype)
    scores = logits(weights, states[torch.arange(len(prompts), device=device), ends - 1])

    written: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    positions = ends.clone()
    for _ in range(max_new):
        chosen = choose(scores.float(), temperature)
        keep = []
        for place, (row, token) in enumerate(zip(alive, chosen.tolist(), strict=True)):
            written[row].append(token)
            if token not in stop:
                keep.append(place)
        if not keep:
            break
        if len(keep) < len(alive):
            rows = torch.tensor(keep, device=device)
            cache.keep(rows)
            chosen, positions = chosen[rows], positions[rows]
            alive = [alive[place] for place in keep]
        cache.positions_BL = positions[:, None]
        rope = (cos[0, 0, positions][:, None, None], sin[0, 0, positions][:, None, None])
        states, _ = family.hidden_states(weights, chosen[:, None], rope, cache, dtype)
        scores = logits(weights, states[:, 0])
        positions = positions + 1
    return written


@torch.no_grad()
def mean_loss(family: Family, weights: Weights, batch: Tensor, dtype: torch.dtype = torch.float32) -> float:
    """Cross-entropy of the trained positions of one batch [4, rows, length]; few rows at a time, with all scores."""
    rows = max(1, SCORES // batch.shape[-1] ** 2)
    total, count = 0.0, 0
    for part in batch.long().split(rows, dim=1):
        loss, trained = _sum_loss(family, weights, part, dtype)
        total, count = total + loss, count + trained
    return total / max(1, count)


def _sum_loss(family: Family, weights: Weights, batch: Tensor, dtype: torch.dtype) -> tuple[float, int]:
    """The sum over the trained positions, and how many there are."""
    ids, targets, docs, positions = batch
    cos, sin = family.rope_tables(ids.shape[1], ids.device)
    rope = (cos[positions][:, None], sin[positions][:, None])
    states, _ = family.hidden_states(weights, ids, rope, DenseAttend(family.shape, docs), dtype)
    chosen = targets >= 0
    scores = logits(weights, states[chosen]).float()
    return float(torch.nn.functional.cross_entropy(scores, targets[chosen], reduction="sum")), int(chosen.sum())
