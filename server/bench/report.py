"""Shows a run: the table for people, the JSON document for programs."""

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.version import service_version
from server.bench.config import BenchConfig
from server.bench.summary import PERCENTILES, Latency, Summary
from server.bench.workload import PATHS, Accepted

_SECRET_FLAG = "--api-key"
_COLUMNS = ("mean", *PERCENTILES, "max")


def table(config: BenchConfig, accepted: Accepted, summary: Summary) -> str:
    """What is printed at the end of a run."""
    load = f"{config.concurrency} streams" if config.concurrency else f"{config.request_rate:g} requests/s"
    lines = [f"{accepted.model}: /v1{PATHS[config.endpoint]} with {load}, {summary.duration_s:.1f} s"]
    if summary.void_reasons:
        lines += [f"VOID: {reason}" for reason in summary.void_reasons]
    cut = f", {summary.num_cut} still running at the end" if summary.num_cut else ""
    lines.append(f"{summary.num_finished} requests finished, {summary.num_failed} failed{cut}")
    lines += [f"  {each.count} x {kind}: {each.example}" for kind, each in summary.failures.items()]
    lines += ["", *(f"{name:<18}{value:>12}" for name, value in _rates(summary))]
    if summary.counting != "per chunk":
        lines.append(f"tokens are counted by {summary.counting}: one for each chunk with text, so ITL is per chunk")
    lines += ["", f"{'ms':<8}" + "".join(f"{name:>11}" for name in _COLUMNS)]
    for name, latency in latencies(summary).items():
        lines.append(f"{name:<8}" + "".join(_cells(latency)))
    shares = ", ".join(f"{share:.0%}" for share in summary.cpu_shares)
    lines += ["", f"CPU of the client processes: {shares} of a core"]
    return "\n".join(lines) + "\n"


def document(config: BenchConfig, accepted: Accepted, summary: Summary, argv: Sequence[str]) -> dict[str, Any]:
    """What --json writes."""
    target = config.target
    return {
        "command": command_of(argv),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "moe-serve": service_version(),
            "python": platform.python_version(),
            "uvloop": version("uvloop") if platform.system() != "Windows" else None,
            "system": platform.platform(),
            "cores": os.cpu_count(),
        },
        "server": {
            "url": f"{target.scheme}://{target.host}:{target.port}{target.path}",
            "version": accepted.server_version,
            "model": accepted.model,
            "prompts": "token ids" if accepted.takes_ids else "text",
            "stream_options": accepted.stream_options,
        },
        "settings": {
            "endpoint": config.endpoint,
            "concurrency": config.concurrency,
            "request_rate": config.request_rate,
            "num_requests": config.num_requests,
            "seconds": config.seconds,
            "warmup": config.warmup,
            "prompt_tokens": [config.prompt_tokens.low, config.prompt_tokens.high],
            "answer_tokens": [config.answer_tokens.low, config.answer_tokens.high],
            "dataset": None if config.dataset is None else str(config.dataset),
            "ignore_eos": config.ignore_eos,
            "seed": config.seed,
            "extra_body": dict(config.extra_body),
            "processes": config.processes,
        },
        "is_void": bool(summary.void_reasons),
        "void_reasons": summary.void_reasons,
        "results": results(summary),
    }


def results(summary: Summary) -> dict[str, Any]:
    """The figures of a run, latencies in ms."""
    prompt_tokens = summary.prompt_tokens
    return {
        "duration_s": round(summary.duration_s, 4),
        "requests_finished": summary.num_finished,
        "requests_failed": summary.num_failed,
        "requests_cut": summary.num_cut,
        "errors": {kind: {"count": each.count, "example": each.example} for kind, each in summary.failures.items()},
        "output_tokens": summary.output_tokens,
        "prompt_tokens": prompt_tokens,
        "requests_per_s": round(summary.per_second(summary.num_finished), 4),
        "output_tokens_per_s": round(summary.per_second(summary.output_tokens), 4),
        "prompt_tokens_per_s": None if prompt_tokens is None else round(summary.per_second(prompt_tokens), 4),
        "token_counting": summary.counting,
        "latencies_ms": {
            name.lower(): None if latency is None else latency.as_dict()
            for name, latency in latencies(summary).items()
        },
        "client_cpu_shares": [round(share, 4) for share in summary.cpu_shares],
    }  # fmt: skip


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write the document."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def latencies(summary: Summary) -> dict[str, Latency | None]:
    """The four latencies by their usual short names."""
    return {"TTFT": summary.ttft, "ITL": summary.itl, "TPOT": summary.tpot, "E2E": summary.e2e}


def command_of(argv: Sequence[str]) -> str:
    """The command line without the key."""
    words, hide_next = [], False
    for word in argv:
        is_joined = word.startswith(f"{_SECRET_FLAG}=")
        words.append("***" if hide_next else f"{_SECRET_FLAG}=***" if is_joined else word)
        hide_next = word == _SECRET_FLAG
    return " ".join(["moe-serve", "bench", *words])


def _rates(summary: Summary) -> list[tuple[str, str]]:
    prompt = "unknown" if summary.prompt_tokens is None else f"{summary.per_second(summary.prompt_tokens):.1f}"
    return [
        ("output tokens/s", f"{summary.per_second(summary.output_tokens):.1f}"),
        ("prompt tokens/s", prompt),
        ("requests/s", f"{summary.per_second(summary.num_finished):.2f}"),
    ]


def _cells(latency: Latency | None) -> list[str]:
    if latency is None:
        return [f"{'-':>11}"] * len(_COLUMNS)
    rows = latency.as_dict()
    return [f"{rows[name]:>11.2f}" for name in _COLUMNS]
