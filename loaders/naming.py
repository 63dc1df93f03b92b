"""Rules about tensor names that hold for more than one model: layer numbers, prediction layers, renamed tensors.

Families own their own names; here a source can be looked at under other names, and the extra prediction (MTP) layers of
DeepSeek checkpoints are recognised whatever their prefix is.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import torch

from loaders.errors import CheckpointError
from loaders.source import TensorMeta, TensorSource

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MTP = re.compile(r"(?:^|\.)mtp\.")


def layer_index(name: str) -> int | None:
    """Number after `layers.`, with or without a prefix before it; None for tensors outside the layers."""
    match = _LAYER.search(name)
    return int(match.group(1)) if match else None


def is_prediction_layer(name: str, num_hidden_layers: int) -> bool:
    """True for tensors of layers beyond the model's own: multi-token prediction, or a config cut short."""
    index = layer_index(name)
    return _MTP.search(name) is not None or (index is not None and index >= num_hidden_layers)


def skip_prediction_layers(source: TensorSource, num_hidden_layers: int) -> None:
    """Leave out every tensor of layers >= `num_hidden_layers` and of `mtp.*`, unread, with one log line."""
    names = [name for name in source.names() if is_prediction_layer(name, num_hidden_layers)]
    source.skip(names, f"layers beyond num_hidden_layers = {num_hidden_layers} (multi-token prediction)")


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
