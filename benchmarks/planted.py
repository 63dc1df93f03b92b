"""Faults that somebody could make, planted into a running program by patching it. No product code knows of them.

A fault `in the layout` is made where a backend prepares canonical weights, so the self-check's reference does not have
it. A fault `in the file` is made where weights are read: both sides of the self-check have it.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

import model.moe_layer
import model.rope
from model.families.gpt_oss import GptOssAttention, GptOssFamily
from moe.backend import Backend
from moe.formats import ExpertWeights

LAYER, EXPERT = 1, 3
NO_SINK = -1e4  # as a logit: its share of any softmax is 0
Change = Callable[[ExpertWeights], ExpertWeights]


def swapped_halves(experts: ExpertWeights) -> ExpertWeights:
    """Gate and up trade places, biases too."""

    def swapped(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)

    changes = {name: swapped(tensor) for name, tensor in _tensors(experts.w13).items() if tensor.ndim > 2}
    b13 = None if experts.b13 is None else swapped(experts.b13)
    return dataclasses.replace(experts, w13=dataclasses.replace(experts.w13, **changes), b13=b13)


def doubled_scale(experts: ExpertWeights) -> ExpertWeights:
    """Every scale of one expert's second matrix is off by one power of two."""
    scales = _tensors(experts.w2)["scales"].clone()
    scales[EXPERT] = (
        scales[EXPERT] + 1 if scales.dtype == torch.uint8 else (scales[EXPERT].float() * 2).to(scales.dtype)
    )
    return dataclasses.replace(experts, w2=dataclasses.replace(experts.w2, scales=scales))


def missing_bias(experts: ExpertWeights) -> ExpertWeights:
    """One expert's second bias is zero."""
    if experts.b2 is None:
        raise ValueError("these experts have no biases")
    b2 = experts.b2.clone()
    b2[EXPERT] = 0
    return dataclasses.replace(experts, b2=b2)


def _tensors(weight: Any) -> dict[str, torch.Tensor]:
    values = {field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def in_layout(change: Change) -> Any:
    """A patch: layer `LAYER`, counted as layers are prepared, is laid out from changed weights."""
    prepare, seen = Backend.prepare, []

    def prepare_changed(self: Any, experts: ExpertWeights, config: Any, topology: Any) -> Any:
        seen.append(None)
        return prepare(self, change(experts) if len(seen) == LAYER + 1 else experts, config, topology)

    return patch.object(Backend, "prepare", prepare_changed)


def in_file(change: Change) -> Any:
    """A patch: layer `LAYER` is read as if its file held changed weights."""
    read = GptOssFamily.read_experts

    def read_changed(self: Any, reader: Any, layer: int, *others: Any) -> ExpertWeights:
        experts = read(self, reader, layer, *others)
        return change(experts) if layer == LAYER else experts

    return patch.object(GptOssFamily, "read_experts", read_changed)


def window(change: Callable[[int], int | None]) -> Any:
    """A patch: sliding layers see another number of tokens, None for all."""
    spec_of = GptOssFamily.attention_spec

    def changed(self: Any, layer: int) -> Any:
        spec = spec_of(self, layer)
        return spec if spec.window is None else dataclasses.replace(spec, window=change(spec.window))

    return patch.object(GptOssFamily, "attention_spec", changed)


def no_sinks() -> Any:
    """A patch: the softmax of attention has no sink."""
    make = GptOssAttention.__init__

    def made(self: Any, *, sinks_H: torch.Tensor, **others: Any) -> None:
        make(self, sinks_H=torch.full_like(sinks_H, NO_SINK), **others)

    return patch.object(GptOssAttention, "__init__", made)


@contextmanager
def unnormalised() -> Iterator[None]:
    """A patch: weights of the chosen experts are shares of all experts, so they add up to less than 1."""
    route = model.moe_layer.route

    def changed(logits_TE: torch.Tensor, config: Any, *others: Any) -> Any:
        return route(logits_TE, dataclasses.replace(config, normalize=False), *others)

    with ExitStack() as patches:
        patches.enter_context(patch.object(model.moe_layer, "route", changed))
        patches.enter_context(patch.object(model.moe_layer, "fused_router", lambda *_: None))
        yield


def no_router_bias() -> Any:
    """A patch: experts are chosen without the router's bias."""
    make = model.moe_layer.Gate.__init__

    def made(self: Any, weight_EH: torch.Tensor, bias_E: torch.Tensor | None, out_dtype: torch.dtype) -> None:
        del bias_E
        make(self, weight_EH, None, out_dtype)

    return patch.object(model.moe_layer.Gate, "__init__", made)


def no_yarn() -> Any:
    """A patch: positions turn by plain frequencies, as if the context had never been stretched."""
    frequencies = model.rope.inverse_frequencies

    def plain(rope: Any, dim: int) -> torch.Tensor:
        return frequencies(dataclasses.replace(rope, rope_type="default"), dim)

    return patch.object(model.rope, "inverse_frequencies", plain)


FAULTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "swapped-layout": ("gate and up swapped in the layout, layer 1", lambda: in_layout(swapped_halves)),
    "swapped-file": ("gate and up swapped in the file, layer 1", lambda: in_file(swapped_halves)),
    "scale-layout": ("a scale of one expert doubled in the layout, layer 1", lambda: in_layout(doubled_scale)),
    "scale-file": ("a scale of one expert doubled in the file, layer 1", lambda: in_file(doubled_scale)),
    "bias-layout": ("second bias of one expert missing in the layout, layer 1", lambda: in_layout(missing_bias)),
    "window-half": ("window of half the size", lambda: window(lambda size: size // 2)),
    "window-plus-one": ("window of one token more", lambda: window(lambda size: size + 1)),
    "window-none": ("no window at all", lambda: window(lambda _: None)),
    "no-sinks": ("attention sinks missing", no_sinks),
    "unnormalised": ("top-k weights not normalised", unnormalised),
    "no-router-bias": ("bias of the router missing", no_router_bias),
    "no-yarn": ("YaRN not applied", no_yarn),
}
"""Name of each fault: what it is in words, and what plants it for a `with` block."""
