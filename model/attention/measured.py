"""Times of the Triton kernels against others, as `measured.json` has them. Measures nothing.

The file has tables with `gpu`, `kind` of layer (heads or latent), `rival`, `card`, `source`, and `shares`: the time of
the Triton kernels over the rival's, by case. `benchmarks/attention_tables.py` writes it.
"""

import json
from collections.abc import Iterable
from importlib import resources
from typing import Any

from model.attention.base import AttentionSpec

TABLE = "measured.json"
Entry = dict[str, Any]


def read_tables() -> list[Entry]:
    """All that was measured."""
    text = resources.files(__package__ or "").joinpath(TABLE).read_text(encoding="utf-8")
    entries: list[Entry] = json.loads(text)["tables"]
    return entries


def tables_for(specs: Iterable[AttentionSpec], arch: str, entries: Iterable[Entry]) -> list[Entry]:
    """The tables of these kinds of layers on this architecture."""
    kinds = {kind_of(spec) for spec in specs}
    return [entry for entry in entries if entry["gpu"] == arch and entry["kind"] in kinds]


def kind_of(spec: AttentionSpec) -> str:
    """Kind of layer in the tables."""
    return "latent" if spec.values_in_keys else "heads"
