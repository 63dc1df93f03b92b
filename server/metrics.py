"""Prometheus metrics of one app, in a registry of its own. Labels: served names, routes, the model's MoE layers."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.types import EngineInfo, EngineStats

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PREFIX = "moe_serve"
_COMPILED = "Kernels that were compiled, or loaded compiled from disk, while requests could wait for them"


class Metrics:
    """Counters of the HTTP side, and the engine's last snapshot."""

    def __init__(
        self, engine_stats: Callable[[], EngineStats | None], engine_info: Callable[[], EngineInfo | None]
    ) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self.responses = Counter(f"{_PREFIX}_http_responses", "HTTP responses", ["route", "status"], registry=registry)
        self.prompt_tokens = Counter(f"{_PREFIX}_prompt_tokens", "Prompt tokens served", ["model"], registry=registry)
        self.completion_tokens = Counter(
            f"{_PREFIX}_completion_tokens", "Generated tokens served", ["model"], registry=registry
        )
        self.finished = Counter(
            f"{_PREFIX}_choices_finished", "Finished choices", ["model", "reason"], registry=registry
        )
        self.empty_answers = Counter(
            f"{_PREFIX}_empty_answers",
            "Finished choices with tokens but neither content nor a tool call",
            ["model", "reason"],
            registry=registry,
        )
        self.undeclared_calls = Counter(
            f"{_PREFIX}_undeclared_tool_calls",
            "Calls to functions that the request did not offer, answered as text",
            ["model"],
            registry=registry,
        )
        self.ignored_keys = Counter(
            f"{_PREFIX}_ignored_keys", "Unknown keys in messages, tool calls and tools of requests", registry=registry
        )
        self.first_token_seconds = Histogram(
            f"{_PREFIX}_time_to_first_token_seconds",
            "From the request to its first token",
            ["model"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.request_seconds = Histogram(
            f"{_PREFIX}_request_seconds", "From the request to its end", ["model"], buckets=_SECONDS, registry=registry
        )
        self.inflight = Gauge(f"{_PREFIX}_requests_in_flight", "Requests being served", registry=registry)
        registry.register(_EngineCollector(engine_stats))
        registry.register(_InfoCollector(engine_info))

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Shows the engine's snapshot as it is at scrape time."""

    def __init__(self, engine_stats: Callable[[], EngineStats | None]) -> None:
        self._engine_stats = engine_stats

    def collect(self) -> Iterable[Metric]:
        stats = self._engine_stats()
        if stats is None:
            return
        for name in EngineStats.__struct_fields__:
            value = getattr(stats, name)
            label = name.removeprefix("num_")
            if name == "num_kernels_compiled_after_ready":
                yield CounterMetricFamily(f"{_PREFIX}_{label}", _COMPILED, value)
            elif label in ("running", "waiting", "pages_used", "pages_total"):
                yield GaugeMetricFamily(f"{_PREFIX}_engine_{label}", f"Engine: {label.replace('_', ' ')}", value)
            else:
                yield CounterMetricFamily(f"{_PREFIX}_engine_{label}", f"Engine: {label.replace('_', ' ')}", value)


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
