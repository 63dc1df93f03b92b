"""From the records of a run to its figures. Pure arithmetic: reads no clock and prints nothing.

TTFT   time to first token: from when the request was due to the first chunk with a token
ITL    inter-token latency: the gap before a chunk, divided evenly among the tokens in it, one value a token;
       tokens that come together with the first one have no gap and no value
TPOT   time per output token of one request: (last chunk - first chunk) / (tokens - 1)
E2E    from when the request was due to the end of its answer
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from server.bench.load import Record
from server.bench.processes import RunResult

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9}
MAX_CPU_SHARE = 0.7  # of a core; beyond it the client's own queue shows in the latencies


@dataclass(frozen=True, slots=True)
class Latency:
    """Distribution of one latency in ms. Percentiles are interpolated linearly between the sorted values."""

    count: int
    mean_ms: float
    percentiles_ms: Mapping[str, float]
    max_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float] | np.ndarray) -> "Latency | None":
        """None if there are no values."""
        values_ms = np.asarray(seconds, dtype=np.float64) * 1000
        if not values_ms.size:
            return None
        found = np.percentile(values_ms, list(PERCENTILES.values()))
        return cls(
            count=int(values_ms.size),
            mean_ms=float(values_ms.mean()),
            percentiles_ms={name: float(value) for name, value in zip(PERCENTILES, found, strict=True)},
            max_ms=float(values_ms.max()),
        )

    def as_dict(self) -> dict[str, float]:
        """Flat, for JSON and tables."""
        rows = {"count": self.count, "mean": self.mean_ms, **self.percentiles_ms, "max": self.max_ms}
        return {name: round(value, 4) for name, value in rows.items()}


@dataclass(frozen=True, slots=True)
class Failures:
    """Requests that failed in one way, with the words of the first."""

    count: int
    example: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The figures of a run. Tokens of failed requests do not count; those of cut ones do."""

    duration_s: float
    num_finished: int
    num_cut: int
    failures: Mapping[str, Failures]
    output_tokens: int
    prompt_tokens: int | None  # None: the server did not say for every answer
    counting: str  # the least exact way in which tokens of an answer were counted; see `events`
    ttft: Latency | None
    itl: Latency | None
    tpot: Latency | None
    e2e: Latency | None
    cpu_shares: Sequence[float]  # of each client process

    @property
    def num_failed(self) -> int:
        """Requests that failed."""
        return sum(each.count for each in self.failures.values())

    @property
    def void_reasons(self) -> list[str]:
        """Why the figures say more about the client than about the server; empty if they do not."""
        return [
            f"client process {index} used {share:.0%} of a core (limit {MAX_CPU_SHARE:.0%}): use more --processes"
            for index, share in enumerate(self.cpu_shares)
            if share > MAX_CPU_SHARE
        ]

    def per_second(self, amount: int) -> float:
        """`amount` over the duration of the run."""
        return amount / self.duration_s if self.duration_s else 0.0


def summarize(run: RunResult) -> Summary:
    """The figures of a run."""
    records = run.records
    counted = [record for record in records if record.error is None]
    finished = [record for record in counted if not record.is_cut]
    prompts = [record.prompt_tokens for record in counted if not record.is_cut or record.times]
    ranks = ("per chunk", "usage", "chunks")
    return Summary(
        duration_s=run.duration_s,
        num_finished=len(finished),
        num_cut=len(counted) - len(finished),
        failures=_failures(records),
        output_tokens=sum(record.output_tokens for record in counted),
        prompt_tokens=None if None in prompts else sum(count for count in prompts if count is not None),
        counting=max((record.counting for record in finished), key=ranks.index, default="chunks"),
        ttft=Latency.of([record.times[0] - record.start_s for record in counted if record.times]),
        itl=Latency.of(token_gaps(counted)),
        tpot=Latency.of([seconds for record in finished if (seconds := _per_token(record)) is not None]),
        e2e=Latency.of([record.end_s - record.start_s for record in finished]),
        cpu_shares=[process.cpu_share for process in run.processes],
    )


def token_gaps(records: Iterable[Record]) -> np.ndarray:
    """Inter-token latencies in seconds, one for each token after the first chunk of its answer."""
    gaps = [np.empty(0)]
    for record in records:
        counts = np.array(record.counts[1:], dtype=np.int64)
        gaps.append(np.repeat(np.diff(np.array(record.times)) / counts, counts))
    return np.concatenate(gaps)


def tokens_per_second(run: RunResult, records: Iterable[Record]) -> np.ndarray:
    """Tokens that arrived in each second of the run; a last partial one is left out, unless it is the only one."""
    num_seconds = max(1, int(run.duration_s))
    totals = np.zeros(num_seconds + 1)  # the last entry takes the rest
    for record in records:
        seconds = (np.array(record.times) - run.start_s).astype(np.int64).clip(0, num_seconds)
        np.add.at(totals, seconds, np.array(record.counts))
    return totals[:-1]


def _per_token(record: Record) -> float | None:
    if record.output_tokens < 2 or len(record.times) < 2:
        return None
    return (record.times[-1] - record.times[0]) / (record.output_tokens - 1)


def _failures(records: Iterable[Record]) -> dict[str, Failures]:
    found: dict[str, Failures] = {}
    for record in records:
        if record.error is not None:
            before = found.get(record.error, Failures(0, record.detail))
            found[record.error] = Failures(before.count + 1, before.example)
    return dict(sorted(found.items()))
