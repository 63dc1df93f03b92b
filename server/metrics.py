"""Prometheus metrics of the service, in a registry of its own. Labels: served names, routes, the model's MoE layers."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.step_sizes import STEP_TOKENS
from engine.types import EngineInfo, EngineStats, ExpertLoad
from server.errors import Exhausted
from server.expert_metrics import ExpertCollector
from server.series import Counter, Histogram, families
from server.stall import StallReason, StallWatch
from server.tally import Gauge, Tally
from server.vllm_names import VllmNames

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEP_SECONDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10,
)  # fmt: skip
_TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_PREFIX = "moe_serve"
_ENGINE_GAUGES = ("num_running", "num_waiting", "num_pages_used", "num_pages_total")
_ENGINE_NAMES = {
    "num_kernels_compiled_after_ready": (
        "kernels_compiled_after_ready",
        "Kernels that were compiled, or loaded compiled from disk, while requests could wait for them",
    ),
    "num_not_finite": ("engine_not_finite", "Requests that ended because their logits were not finite"),
    "num_pages_total": ("engine_pages", "KV pages, used or free"),  # _total is for counters
}


class Metrics:
    """Numbers of the HTTP side, kept in a tally, and the engine's last snapshot."""

    def __init__(
        self,
        engine_stats: Callable[[], EngineStats | None],
        engine_info: Callable[[], EngineInfo | None],
        tally: Tally,
        stall: StallWatch | None = None,
        vllm_model: str | None = None,
        expert_load: Callable[[], ExpertLoad | None] = lambda: None,
    ) -> None:
        """`vllm_model`: also show vLLM's names, with this name of the model for the engine's numbers."""

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(tally, f"{_PREFIX}_{name}", text, labels)

        def histogram(name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(tally, f"{_PREFIX}_{name}", text, ["model"], buckets)

        self.responses = counter("http_responses", "HTTP responses", "route", "status")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens served", "model")
        self.completion_tokens = counter("completion_tokens", "Generated tokens served", "model")
        self.finished = counter("choices_finished", "Finished choices", "model", "reason")
        self.empty_answers = counter(
            "empty_answers", "Finished choices with tokens but neither content nor a tool call", "model", "reason"
        )
        self.undeclared_calls = counter(
            "undeclared_tool_calls", "Calls to functions that the request did not offer, answered as text", "model"
        )
        self.refused = counter("refused", "Requests refused with a 429, by what had run out", "what")
        for what in get_args(Exhausted):
            self.refused.inc(what, by=0)  # alerts on a rate need the first value
        self.ignored_keys = counter("ignored_keys", "Unknown keys in messages, tool calls and tools of requests")
        self.first_token_seconds = histogram("time_to_first_token_seconds", "From the request to its first token")
        self.request_seconds = histogram("request_seconds", "From the request to its end")
        self.inter_token_seconds = histogram("inter_token_seconds", "From a token to the next one", _STEP_SECONDS)
        self.seconds_per_token = histogram("seconds_per_token", "A request's mean time between tokens", _STEP_SECONDS)
        self.queue_seconds = histogram("queue_seconds", "In the engine's queue, for each choice")
        self.prefill_seconds = histogram("prefill_seconds", "From the queue to the first token, for each choice")
        self.decode_seconds = histogram("decode_seconds", "From the first token to the last")
        self.inference_seconds = histogram("inference_seconds", "From the queue to the last token")
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self.request_generated_tokens = histogram("request_generated_tokens", "Generated tokens of a request", _TOKENS)
        self.request_max_tokens = histogram("request_max_tokens", "Tokens that a choice may have", _TOKENS)
        metrics = [each for each in vars(self).values() if isinstance(each, Counter | Histogram)]
        collectors: list[Collector] = [_HttpCollector(metrics, tally), _EngineCollector(engine_stats)]
        if vllm_model is not None:
            collectors.append(VllmNames(tuple(collectors), vllm_model, engine_info))
        collectors += [_InfoCollector(engine_info), ExpertCollector(_PREFIX, expert_load)]
        if stall is not None:
            collectors.append(_StallCollector(stall))
        self._registry = CollectorRegistry()
        for collector in collectors:
            self._registry.register(collector)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)


class _HttpCollector(Collector):
    """Shows the tally as it is at scrape time."""

    def __init__(self, metrics: list[Counter | Histogram], tally: Tally) -> None:
        self._metrics = metrics
        self._tally = tally

    def collect(self) -> Iterable[Metric]:
        yield from families(self._metrics, self._tally.totals())
        num_inflight = self._tally.sum_gauge(Gauge.IN_FLIGHT)
        yield GaugeMetricFamily(f"{_PREFIX}_requests_in_flight", "Requests being served", num_inflight)


class _EngineCollector(Collector):
    """Shows the engine's snapshot as it is at scrape time."""

    def __init__(self, engine_stats: Callable[[], EngineStats | None]) -> None:
        self._engine_stats = engine_stats

    def collect(self) -> Iterable[Metric]:
        stats = self._engine_stats()
        if stats is None:
            return
        for name in EngineStats.__struct_fields__:
            if name in ("step_sizes", "num_step_tokens"):  # the histogram below
                continue
            name_shown, words = _ENGINE_NAMES.get(name, (f"engine_{name.removeprefix('num_')}", None))
            kind = GaugeMetricFamily if name in _ENGINE_GAUGES else CounterMetricFamily
            words = words or f"Engine: {name.removeprefix('num_').replace('_', ' ')}"
            yield kind(f"{_PREFIX}_{name_shown}", words, getattr(stats, name))
        yield from _step_sizes(stats)


def _step_sizes(stats: EngineStats) -> Iterable[Metric]:
    if not stats.step_sizes:
        return
    family = HistogramMetricFamily(f"{_PREFIX}_engine_step_tokens", "Tokens of prompt and answer that a step computed")
    bounds = [*map(repr, map(float, STEP_TOKENS)), "+Inf"]
    family.add_metric([], list(zip(bounds, accumulate(stats.step_sizes), strict=False)), stats.num_step_tokens)
    yield family


class _StallCollector(Collector):
    """For how long no token has been computed although requests want some, by the reason."""

    def __init__(self, stall: StallWatch) -> None:
        self._stall = stall

    def collect(self) -> Iterable[Metric]:
        text = "Seconds since the last token while requests wait or run, by what holds them up"
        family = GaugeMetricFamily(f"{_PREFIX}_stall_seconds", text, labels=["reason"])
        reason, seconds = self._stall.waiting_since()
        for each in StallReason:
            family.add_metric([each], seconds if each is reason else 0.0)
        yield family


class _InfoCollector(Collector):
    """What the engine says once: the tokens that fit, and what the check at load found, layer by layer."""

    def __init__(self, engine_info: Callable[[], EngineInfo | None]) -> None:
        self._engine_info = engine_info

    def collect(self) -> Iterable[Metric]:
        info = self._engine_info()
        if info is not None:
            name = f"{_PREFIX}_engine_kv_tokens"
            yield GaugeMetricFamily(name, "Tokens that fit into the KV cache", info.num_kv_tokens)
        checks = [] if info is None else info.selfcheck
        labels = ["layer", "path"]
        error = GaugeMetricFamily(f"{_PREFIX}_selfcheck_error", "Largest relative error of any expert", labels=labels)
        tolerance = GaugeMetricFamily(f"{_PREFIX}_selfcheck_tolerance", "Largest error that passes", labels=labels)
        for check in checks:
            error.add_metric([str(check.layer), check.path], check.worst_error)
            tolerance.add_metric([str(check.layer), check.path], check.tolerance)
        yield error
        yield tolerance
