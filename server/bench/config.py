"""`BenchConfig`: what one run does. Checked when made; reads no flags itself."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from server.bench.connection import Target
from server.bench.errors import BenchError

_STREAMS_PER_PROCESS = 64
_RATE_PER_PROCESS = 50.0
# Request fields that decide what is measured, with the flag to use instead.
_OWN_FIELDS = {
    "model": "; use --model",
    "prompt": "; use --prompt-tokens or --dataset",
    "messages": "; use --dataset",
    "max_tokens": "; use --answer-tokens",
    "max_completion_tokens": "; use --answer-tokens",
    "ignore_eos": "; use --ignore-eos",
    "stream": ", which times every token",
    "stream_options": ", which counts tokens by it",
    "n": ", which counts one answer for a request",
}
LOWEST_TOKEN_ID = 100  # lower ones are control tokens in some vocabularies
MAX_TOKENS = 10_000_000  # of a prompt or an answer
_MAX_VOCAB_SIZE = 2**31
# Lowest and highest number of each whole-number flag.
_RANGES = {
    "concurrency": (1, 100_000),
    "num_requests": (1, 10**9),
    "warmup": (0, 10**6),
    "processes": (1, 1024),
    "vocab_size": (LOWEST_TOKEN_ID + 1, _MAX_VOCAB_SIZE),
}


@dataclass(frozen=True, slots=True)
class Lengths:
    """A length in tokens, drawn evenly from `low` to `high` for every request."""

    low: int
    high: int

    @classmethod
    def parse(cls, flag: str, text: str) -> "Lengths":
        """From "512" or "256-1024". Raises BenchError that names the flag."""
        low, _, high = text.partition("-")
        try:
            lengths = cls(int(low), int(high or low))
        except ValueError:
            raise BenchError(f"{flag}: {text!r} is neither a number of tokens nor LOW-HIGH") from None
        if not 1 <= lengths.low <= lengths.high <= MAX_TOKENS:
            raise BenchError(f"{flag}: {text!r} must lie between 1 and {MAX_TOKENS}, the lower number first")
        return lengths


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One run. Exactly one of `concurrency` and `request_rate` is set; times are in seconds."""

    target: Target
    endpoint: Literal["completions", "chat"] = "completions"
    model: str | None = None  # None: the first one that the server lists
    concurrency: int | None = None  # requests in flight: each stream sends its next when the last has ended
    request_rate: float | None = None  # requests a second, at random times (Poisson)
    num_requests: int | None = None
    seconds: float | None = None
    warmup: int = 0  # requests that are sent before and not counted
    prompt_tokens: Lengths = Lengths(512, 512)
    answer_tokens: Lengths = Lengths(128, 128)
    dataset: Path | None = None  # lines of JSON with `prompt` or `messages`; None: random prompts
    vocab_size: int = 4000  # random token ids are below it
    ignore_eos: bool = False
    seed: int = 0
    timeout_s: float = 600.0
    processes: int = 1
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.request_rate is None):
            raise BenchError("--concurrency and --request-rate exclude each other: give one of them")
        if self.num_requests is None and self.seconds is None:
            raise BenchError("--num-requests or --seconds: give at least one, or the run never ends")
        for name, (lowest, highest) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not lowest <= value <= highest:
                raise BenchError(f"--{name.replace('_', '-')}: {value} must lie between {lowest} and {highest}")
        if self.concurrency is not None and self.processes > self.concurrency:
            raise BenchError(f"--processes: {self.processes} must not exceed --concurrency {self.concurrency}")
        for name in ("request_rate", "seconds", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                flag = name.removesuffix("_s").replace("_", "-")
                raise BenchError(f"--{flag}: {value} must be above 0 and finite")
        for name, flag in _OWN_FIELDS.items():
            if name in self.extra_body:
                raise BenchError(f"--extra-body: {name!r} is set by the benchmark itself{flag}")


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_processes(concurrency: int | None, request_rate: float | None, num_cores: int | None = None) -> int:
    """Client processes for a load: one per 64 streams or 50 requests a second, at most half of the cores."""
    cores = num_cores or _usable_cores()
    if concurrency is not None:
        wanted = -(-concurrency // _STREAMS_PER_PROCESS)
    else:
        wanted = math.ceil(min(cores, (request_rate or 0.0) / _RATE_PER_PROCESS))  # a NaN gives `cores`; refused later
    return max(1, min(wanted, cores // 2))
