"""Weights with one scale tensor permuted on purpose, as the loader or as a backend could get it wrong."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loaders.checkpoint import Checkpoint
from loaders.hf_config import read_config
from model.registry import make_family
from model.weights import WeightReader
from moe import MoeBackend, MoeRunnerConfig, RankPlace, Topology
from moe.formats import ExpertWeights
from moe.registry import load_backend
from tests.moe.kernels.packed import split_blocks

TINY = Path(__file__).parents[2] / "assets" / "tiny-gpt-oss"
NUM_LAYERS, NUM_EXPERTS = 6, 8
MATRICES, ORDERS = ("w13", "w2"), ("experts", "rows")
_PATTERN = r"layer {layer}, {backend}/none/mxfp4: expert (\d+) differs from the reference by ([\d.e+-]+|inf) in outputs"


def need_named(text: str, backend: MoeBackend, layer: int) -> None:
    """The message names layer, path, expert and error, and the error is far beyond rounding."""
    found = re.search(_PATTERN.format(layer=layer, backend=backend), text)
    assert found, text
    assert float(found[2]) > 0.1, text


def permuted(scales: torch.Tensor, order: str) -> torch.Tensor:
    """[E, rows, ...] with every expert's scales at the next expert, or every row's at the next row."""
    return scales.view(torch.uint8).roll(1, 0 if order == "experts" else 1).view(scales.dtype)


def permute_canonical(experts: ExpertWeights, matrix: str, order: str) -> ExpertWeights:
    """What a loader would hand over that mixes up the scales; works for every backend."""
    weight: Any = getattr(experts, matrix)
    return dataclasses.replace(experts, **{matrix: dataclasses.replace(weight, scales=permuted(weight.scales, order))})


def permute_processed(info: Any, matrix: str, order: str) -> Any:
    """The quant info of a backend that mixes up the scales while it processes them."""
    if hasattr(info, "layer"):  # triton
        packed = getattr(info.layer, matrix)
        if packed.scales is None:
            changed = {"data": _permute_beside_codes(packed.data, order)}
        else:
            scales = permuted(packed.scales.transpose(1, 2).contiguous(), order)
            changed = {"scales": scales.transpose(1, 2).contiguous()}
        return _with_matrix(info, matrix, **changed)
    name = f"{matrix}_scale"  # FlashInfer
    return dataclasses.replace(info, **{name: permuted(getattr(info, name), order)})


def permute_tail(info: Any, matrix: str, order: str) -> Any:
    """The same for triton's last columns of MXFP4 alone."""
    tail = _permute_beside_codes(getattr(info.layer, matrix).tail[:, None], order)
    return _with_matrix(info, matrix, tail=tail.squeeze(1))


def _permute_beside_codes(data: torch.Tensor, order: str) -> torch.Tensor:
    """A copy of packed FP4 [E, steps, blocks of rows, ...] with its scales permuted."""
    data = data.clone()
    scales = split_blocks(data)[1].transpose(1, 2)  # [E, blocks of rows, steps, 64]
    scales.copy_(permuted(scales.contiguous(), order))
    return data


def _with_matrix(info: Any, matrix: str, **changed: torch.Tensor) -> Any:
    packed = dataclasses.replace(getattr(info.layer, matrix), **changed)
    return dataclasses.replace(info, layer=dataclasses.replace(info.layer, **{matrix: packed}))


def break_prepare(
    monkeypatch: pytest.MonkeyPatch, backend: MoeBackend, layer: int, fault: Callable[..., Any], *, is_processed: bool
) -> None:
    """Let the backend's `prepare` apply `fault` to what it gets, or to what it returns, in its call for one layer."""
    kind = type(load_backend(backend))
    prepare, calls = kind.prepare, []

    def broken(self: Any, experts: ExpertWeights, config: MoeRunnerConfig, topology: Topology) -> Any:
        calls.append(experts)
        if len(calls) - 1 != layer:
            return prepare(self, experts, config, topology)
        if is_processed:
            return fault(prepare(self, experts, config, topology))
        return prepare(self, fault(experts), config, topology)

    monkeypatch.setattr(kind, "prepare", broken)


def tiny_experts(layer: int, num_experts: int = NUM_EXPERTS) -> tuple[ExpertWeights, MoeRunnerConfig]:
    """One layer of the bundled model, read as the engine reads it; its first experts only, as if there were no more."""
    family = make_family(read_config(TINY))
    reader = WeightReader(Checkpoint.open(TINY), torch.device("cpu"), torch.bfloat16)
    experts = family.read_experts(reader, layer, RankPlace())
    assert experts.b13 is not None
    assert experts.b2 is not None
    experts = ExpertWeights(
        w13=experts.w13.narrow(0, 0, num_experts), w2=experts.w2.narrow(0, 0, num_experts),
        b13=experts.b13[:num_experts], b2=experts.b2[:num_experts],
    )  # fmt: skip
    shape = dataclasses.replace(family.moe.shape, num_experts=num_experts)
    config = MoeRunnerConfig(shape=shape, activation=family.moe.activation)
    return experts, config
