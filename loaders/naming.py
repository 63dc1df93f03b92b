"""Rules about tensor names that hold for more than one model: layer numbers, prediction layers, renamed tensors.

Families own their own names; here a source can be looked at under other names, and the extra prediction (MTP) layers of
DeepSeek checkpoints are recognised by tensors that only they have, whatever their prefix is.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import torch

from loaders.errors import CheckpointError
from loaders.source import TensorMeta, TensorSource

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.([^.]*)")
_MTP = re.compile(r"(?:^|\.)mtp\.")
_PREDICTION_PARTS = frozenset({"eh_proj", "enorm", "hnorm", "shared_head"})


def layer_index(name: str) -> int | None:
    """Number after `layers.`, with or without a prefix before it; None for tensors outside the layers."""
    match = _LAYER.search(name)
    return int(match.group(1)) if match else None


def prediction_names(names: Collection[str]) -> list[str]:
    """Tensors of the prediction layers: numbered like the model's own and behind them, or called `mtp.*`."""
    layers, extra = _numbered_layers(names)
    found = {name for index in extra for name in layers[index]}
    return [name for name in names if name in found or _MTP.search(name)]


def skip_prediction_layers(source: TensorSource, num_hidden_layers: int) -> None:
    """Leave the prediction layers out, unread, with one log line.

    Raises:
        CheckpointError: the other layers are not those that `num_hidden_layers` counts.
    """
    names = source.names()
    layers, extra = _numbered_layers(names)
    if extra and min(extra) < num_hidden_layers:
        raise CheckpointError(
            f"{source.origin}: layer {min(extra)} is for multi-token prediction and none of the model's own, but "
            f"num_hidden_layers in config.json is {num_hidden_layers}: set it to {min(extra)}"
        )
    last = max(layers.keys() - extra, default=-1)
    if last >= num_hidden_layers:
        raise CheckpointError(
            f"{source.origin}: there is a layer {last}, but num_hidden_layers in config.json is "
            f"{num_hidden_layers}: without its last layers the model would answer nonsense; set it to {last + 1}"
        )
    reason = f"layers beyond num_hidden_layers = {num_hidden_layers} (multi-token prediction)"
    source.skip(prediction_names(names), reason)


def _numbered_layers(names: Iterable[str]) -> tuple[dict[int, list[str]], set[int]]:
    """Tensors by layer, without `mtp.*`, whose layers count from 0 again; and which of the layers predict tokens."""
    layers: dict[int, list[str]] = defaultdict(list)
    extra: set[int] = set()
    for name in names:
        match = _LAYER.search(name)
        if match and not _MTP.search(name):
            layers[int(match.group(1))].append(name)
            if match.group(2) in _PREDICTION_PARTS:
                extra.add(int(match.group(1)))
    return layers, extra


def with_model_prefix(name: str) -> str:
    """`layers.0.x` as `model.layers.0.x`: exports of the bare model leave the prefix out."""
    return f"model.{name}" if name.startswith(("layers.", "embed_tokens.", "norm.")) else name


class RenamedSource(TensorSource):
    """Another source under other names; keeps its own record of what was used."""

    def __init__(self, inner: TensorSource, rule: Callable[[str], str]) -> None:
        """Apply `rule` to every name.

        Raises:
            CheckpointError: two tensors get the same name.
        """
        metas: dict[str, TensorMeta] = {}
        for stored in inner.names():
            name, meta = rule(stored), inner.meta(stored)
            if name in metas:
                raise CheckpointError(f"{metas[name].where} and {meta.where} would both be '{name}'")
            metas[name] = meta if name == stored else replace(meta, name=name, stored_as=stored)
        super().__init__(inner.origin, metas)
        self._inner = inner

    def _map(self, meta: TensorMeta) -> torch.Tensor:
        return self._inner.view(meta.stored_as or meta.name)
