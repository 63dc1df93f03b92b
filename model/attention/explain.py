"""Which attention "auto" takes on a GPU, and the figures behind it, for `moe-serve explain`. Measures nothing."""

from collections.abc import Sequence

import torch

from model.attention.base import (
    ATTENTION_MODULES,
    AttentionSpec,
    attention_verdicts,
    choose_attention,
    not_chosen_reason,
)
from model.attention.measured import TABLE, Entry, kind_of, read_tables, tables_for

WORTH_IT = 1.03  # a rival is worth its place where our kernels take more than so many times its time
_WIDTH = max(map(len, ATTENTION_MODULES))


def explain(specs: Sequence[AttentionSpec], arch: str, entries: Sequence[Entry] | None = None) -> str:
    """A line for each implementation, for layers of these kinds on `arch`, such as sm90 or cpu, and a bf16 cache.

    Whether the packages and their compilers are installed is asked of this machine. `entries`: all measurements by
    default; the choice always rests on those.
    """
    device = torch.device("cpu" if arch == "cpu" else "cuda")
    kinds = sorted({kind_of(spec) for spec in specs})
    entries = read_tables() if entries is None else entries
    measured = tables_for(specs, arch, entries)
    chosen = choose_attention(specs, device, arch=arch)
    lines = [f"attention of {', '.join(kinds)} on {arch}"]
    for name, reason in attention_verdicts(specs, device, arch=arch).items():
        text = reason or "usable"
        if name == chosen:
            text += f"  <- auto, by {_why(name, measured, arch)}"
        elif reason is None and (passed_over := not_chosen_reason(name, specs, arch)):
            text += f" if asked for: {passed_over}"
        if name == "flashinfer" != chosen:
            text += f"; {_figures(name, measured) or 'not measured'}"
        lines.append(f"{name:<{_WIDTH}}  {text}")
    return "\n".join(lines)


def _figures(rival: str, measured: Sequence[Entry]) -> str:
    return "; ".join(_verdict(entry) for entry in measured if entry["rival"] == rival)


def _why(name: str, measured: Sequence[Entry], arch: str) -> str:
    figures = _figures("torch" if name == "triton" else name, measured)
    if name != "torch" and figures:
        return figures
    if arch == "cpu":
        return "rule: the Triton kernels need a GPU"
    order = ", ".join(ATTENTION_MODULES)
    return f"rule: the first of {order} that auto may take; nobody measured these layers against torch on this GPU"


def _verdict(entry: Entry) -> str:
    shares: dict[str, float] = entry["shares"]
    text = (
        f"model/attention/{TABLE}: triton takes {min(shares.values()):.2f} to {max(shares.values()):.2f} of "
        f"{entry['rival']}'s time in {len(shares)} cases of {entry['kind']} ({entry['card']}, {entry['source']})"
    )
    slower = [f"{case} ({share:.2f})" for case, share in shares.items() if share > WORTH_IT]
    return f"{text}; more than 3 % slower in {', '.join(slower)}" if slower else text
