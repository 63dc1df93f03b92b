"""Which attention "auto" takes on a GPU, and the figures behind it, for `moe-serve explain`. Measures nothing.

`measured.json` has tables with `gpu`, `kind` of layer (heads or latent), `rival`, `card`, `source`, and `shares`: the
time of the Triton kernels over the rival's, by case. `benchmarks/attention_tables.py` writes it.
"""

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

import torch

from model.attention.base import ATTENTION_MODULES, AttentionSpec, attention_verdicts, choose_attention

TABLE = "measured.json"
RIVAL = "flashinfer"  # measured, and no part of the service
WORTH_IT = 1.03  # a rival is worth shipping where our kernels take more than so many times its time
_WIDTH = max(map(len, (*ATTENTION_MODULES, RIVAL)))
_Entry = dict[str, Any]


def read_tables() -> list[_Entry]:
    """All that was measured."""
    text = resources.files(__package__ or "").joinpath(TABLE).read_text(encoding="utf-8")
    entries: list[_Entry] = json.loads(text)["tables"]
    return entries


def explain(specs: Sequence[AttentionSpec], arch: str, entries: Sequence[_Entry] | None = None) -> str:
    """A line for each implementation and for FlashInfer, for layers of these kinds on `arch`, such as sm90 or cpu.

    Whether Triton and its compiler are installed is asked of this machine. `entries`: all measurements by default.
    """
    device = torch.device("cpu" if arch == "cpu" else "cuda")
    kinds = sorted({kind_of(spec) for spec in specs})
    entries = read_tables() if entries is None else entries
    measured = [entry for entry in entries if entry["gpu"] == arch and entry["kind"] in kinds]
    chosen = choose_attention(specs, device)
    lines = [f"attention of {', '.join(kinds)} on {arch}"]
    for name, reason in attention_verdicts(specs, device).items():
        text = reason or "usable"
        if name == chosen:
            text += f"  <- auto, by {_why(name, measured, arch)}"
        lines.append(f"{name:<{_WIDTH}}  {text}")
    against = [entry for entry in measured if entry["rival"] == RIVAL]
    text = "; ".join(map(_verdict, against)) or "not measured against FlashInfer"
    return "\n".join([*lines, f"{RIVAL:<{_WIDTH}}  not part of moe-serve; {text}"])


def kind_of(spec: AttentionSpec) -> str:
    """Kind of layer in the tables."""
    return "latent" if spec.values_in_keys else "heads"


def _why(name: str, measured: Sequence[_Entry], arch: str) -> str:
    against = [entry for entry in measured if entry["rival"] == "torch"]
    if name == "triton" and against:
        return "; ".join(map(_verdict, against))
    if arch == "cpu":
        return "rule: the Triton kernels need a GPU"
    return f"rule: the first of {', '.join(ATTENTION_MODULES)} that can; nobody measured these layers on this GPU"


def _verdict(entry: _Entry) -> str:
    shares: dict[str, float] = entry["shares"]
    text = (
        f"model/attention/{TABLE}: triton takes {min(shares.values()):.2f} to {max(shares.values()):.2f} of "
        f"{entry['rival']}'s time in {len(shares)} cases of {entry['kind']} ({entry['card']}, {entry['source']})"
    )
    slower = [f"{case} ({share:.2f})" for case, share in shares.items() if share > WORTH_IT]
    return f"{text}; more than 3 % slower in {', '.join(slower)}" if slower else text
