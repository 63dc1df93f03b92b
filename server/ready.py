"""What the start says at ready: a few lines in colour on a terminal, else one line of JSON."""

import io
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any, TextIO

from engine.logs import LogFormat
from engine.types import EngineInfo, LayerCheck
from engine.units import size_text

_LABEL_WIDTH = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A service that is ready. `url` has no /v1; `seconds` is what the start took."""

    names: tuple[str, ...]
    url: str
    seconds: float
    info: EngineInfo
    num_ranks: int = 1

    @property
    def message(self) -> str:
        """The first thing to know, in one line."""
        return f"{', '.join(self.names)} ready at {self.url}/v1 after {self.seconds:.1f} s"

    def as_json(self) -> dict[str, Any]:
        """For programs that start the service. Sizes are bytes, of one rank if there are several; tokens are of all."""
        info = self.info
        worst = worst_check(info)
        return {
            "event": "ready",
            "message": self.message,
            "url": f"{self.url}/v1",
            "models": list(self.names),
            "seconds": round(self.seconds, 1),
            "device": info.device,
            "dtype": info.dtype,
            "ranks": self.num_ranks,
            "moe": summarize_paths(info),
            "selfcheck": {
                "layers": len(info.selfcheck),
                "worst_error": None if worst is None else worst.worst_error,
                "tolerance": None if worst is None else worst.tolerance,
            },
            "weight_bytes": info.weight_bytes,
            "kv_cache_bytes": info.kv_cache_bytes,
            "kv_cache_tokens": info.num_kv_tokens,
            "max_model_len": info.max_model_len,
        }

    def rows(self) -> list[tuple[str, str]]:
        """For people: label and text of every line below the first."""
        info = self.info
        sizes = f"weights {size_text(info.weight_bytes)}, KV cache {size_text(info.kv_cache_bytes)}"
        return [
            ("model", f"{', '.join(self.names)} on {info.device} in {info.dtype}"),
            ("experts", summarize_paths(info)),
            ("self-check", describe_checks(info)),
            ("memory", sizes + (f" on each of {self.num_ranks} ranks" if self.num_ranks > 1 else "")),
            ("room", f"{info.num_kv_tokens:,} tokens, {info.max_model_len:,} in a request"),
            ("address", f"{self.url}/v1"),
        ]

    def text_for(self, stream: TextIO, log_format: LogFormat) -> str:
        """What to write to a stream: lines for a terminal, unless log lines are JSON, else JSON."""
        if log_format == "json" or not stream.isatty():
            return json.dumps(self.as_json(), ensure_ascii=False) + "\n"
        # A start without a terminal need not wait for these imports.
        from rich.console import Console
        from rich.text import Text

        shown = io.StringIO()
        console = Console(file=shown, force_terminal=True, highlight=False, soft_wrap=True)  # heeds NO_COLOR
        console.print(Text.assemble(("moe-serve: ", "dim"), (self.message, "bold green")))
        for label, text in self.rows():
            console.print(Text.assemble((f"  {label:<{_LABEL_WIDTH}}", "dim"), text))
        return shown.getvalue()


def summarize_paths(info: EngineInfo) -> str:
    """How many MoE layers take which path: backend / transport / format of the experts."""
    paths = Counter(line.partition(": ")[2] or line for line in info.moe_paths)
    return ", ".join(f"{count} MoE layers by {path}" for path, count in paths.items()) or "no MoE layers"


def worst_check(info: EngineInfo) -> LayerCheck | None:
    """The compared layer that came nearest to its tolerance; None if none was compared."""
    return max(info.selfcheck, key=lambda check: check.worst_error / check.tolerance, default=None)


def describe_checks(info: EngineInfo) -> str:
    """How many layers were compared with the reference, and how near the worst came to what is allowed."""
    worst = worst_check(info)
    if worst is None:
        return "off: no layer was compared with the reference"
    return (
        f"{len(info.selfcheck)} of {len(info.moe_paths)} MoE layers compared with the reference, "
        f"largest error {worst.worst_error:.1e} of {worst.tolerance:.0e} allowed"
    )
