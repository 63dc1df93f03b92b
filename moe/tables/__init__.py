"""Measured tables, read once: the fastest backends and launch plans by GPU, format and shape. Chooses nothing.

`backends.json` holds `gpu`, `format`, `a2a`, `shape` of one rank, and `microseconds` by backend and tokens;
`triton_plans.json` holds `arch`, `format`, `shape`, and `steps` as in `PlanTable`. Both name their GPU and source;
`benchmarks/moe_tables.py` writes them.
"""

import functools
import json
import math
from importlib import resources
from typing import Any

Entry = dict[str, Any]  # an object of a JSON file


@functools.cache
def read_entries(name: str) -> list[Entry]:
    """Entries of one file."""
    text = resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
    entries: list[Entry] = json.loads(text)["tables"]
    return entries


def size_distance(measured: dict[str, int], hidden_size: int, intermediate_size: int) -> float:
    """Distance between expert sizes: abs(log(size / measured size))."""
    ratio = max(1, hidden_size * intermediate_size) / (measured["hidden_size"] * measured["intermediate_size"])
    return abs(math.log(ratio))
