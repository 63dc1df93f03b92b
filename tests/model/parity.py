"""Helper: run one of our models as an engine would, in several ways, and compare with transformers' logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from model.config import ModelSettings
from model.decoder import Model
from model.registry import build_model
from tests.model.checkpoints import VOCAB, set_weights, state_by_file_name, write
from tests.model.paged import PagedCache, run

Tensors = dict[str, torch.Tensor]
Pack = Callable[[Tensors], tuple[Tensors, Tensors]]

TOLERANCE = 1e-4


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def packed_pair(
    reference: Any,
    folder: Path,
    pack: Pack | None,
    config_changes: dict[str, Any] | None = None,
    extra: Tensors | None = None,
) -> tuple[Model, Any]:
    """(our model from the packed checkpoint, transformers' model with the dequantized weights)."""
    tensors = state_by_file_name(reference, folder)
    if pack is not None:
        tensors, dense = pack(tensors)
        reference = set_weights(reference, dense, folder)
    write(folder, tensors | (extra or {}), config_changes)
    return build_model(folder, ModelSettings()), reference


def check_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Relative error of every row below the tolerance."""
    error = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.max() < TOLERANCE, f"relative error {error.max():.2e} at row {int(error.argmax())}"


def check_all_ways(model: Model, reference: Any, length: int) -> None:
    """Whole prefill; token by token; chunks; and three requests of different lengths mixed in every step."""
    ids = prompt(length, 1)
    want = reference(torch.tensor([ids])).logits[0]
    cache = PagedCache(model.kv_specs)
    check_close(run(model, cache.batch({"whole": ids}, all_logits=True), cache.layers), want)

    start = length - 24
    run(model, cache.batch({"steps": ids[:start]}), cache.layers)
    for i in range(start, length):
        check_close(run(model, cache.batch({"steps": ids[i : i + 1]}), cache.layers), want[i : i + 1])

    for chunk in (ids[:7], ids[7:40], ids[40:]):
        got = run(model, cache.batch({"chunks": chunk}, all_logits=True), cache.layers)
    check_close(got, want[40:])

    others = {"b": prompt(31, 2), "c": prompt(9, 3)}
    wants = {name: reference(torch.tensor([seq])).logits[0] for name, seq in others.items()} | {"a": want}
    sequences = {"a": ids} | others
    cache = PagedCache(model.kv_specs, seed=5)
    for step in ({"b": 20, "a": 60}, {"a": 1, "c": 4, "b": 1}, {"c": 1, "b": 1, "a": 1}, {"a": 1, "b": 9, "c": 4}):
        ranges = {n: range(cache.lengths.get(n, 0), cache.lengths.get(n, 0) + count) for n, count in step.items()}
        batch = cache.batch({n: sequences[n][r.start : r.stop] for n, r in ranges.items()}, all_logits=True)
        check_close(run(model, batch, cache.layers), torch.cat([wants[n][r.start : r.stop] for n, r in ranges.items()]))
