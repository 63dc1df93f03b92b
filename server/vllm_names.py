"""`VllmNames`: our metrics once more, under the names and labels of vLLM, which existing boards and alerts read.

Metrics of things that this service does not do, such as speculative decoding, have no counterpart.
"""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from engine.types import EngineInfo

PREFIX = "vllm:"

OURS: dict[str, str] = {
    "num_requests_running": "moe_serve_engine_running",
    "num_requests_waiting": "moe_serve_engine_waiting",
    "prefix_cache_queries": "moe_serve_engine_prompt_tokens",
    "prefix_cache_hits": "moe_serve_engine_cached_tokens",
    "num_preemptions": "moe_serve_engine_preemptions",
    "iteration_tokens_total": "moe_serve_engine_step_tokens",
    "corrupted_requests": "moe_serve_engine_not_finite",
    "prompt_tokens": "moe_serve_engine_prompt_tokens",
    "generation_tokens": "moe_serve_engine_generated_tokens",
    "request_success": "moe_serve_choices_finished",
    "time_to_first_token_seconds": "moe_serve_time_to_first_token_seconds",
    "inter_token_latency_seconds": "moe_serve_inter_token_seconds",
    "e2e_request_latency_seconds": "moe_serve_request_seconds",
    "request_time_per_output_token_seconds": "moe_serve_seconds_per_token",
    "request_queue_time_seconds": "moe_serve_queue_seconds",
    "request_prefill_time_seconds": "moe_serve_prefill_seconds",
    "request_decode_time_seconds": "moe_serve_decode_seconds",
    "request_inference_time_seconds": "moe_serve_inference_seconds",
    "request_prompt_tokens": "moe_serve_request_prompt_tokens",
    "request_generation_tokens": "moe_serve_request_generated_tokens",
    "request_params_max_tokens": "moe_serve_request_max_tokens",
}
"""vLLM's name without its prefix, and ours. The others are computed: KV use, refusals, and facts of the cache."""

_LABELS = {"model": "model_name", "reason": "finished_reason"}
_REFUSED, _QUEUE_FULL = "moe_serve_refused", "max_num_queued_reqs"  # vLLM's reason for what we call "queue"
_USED, _TOTAL = "moe_serve_engine_pages_used", "moe_serve_engine_pages"


class VllmNames(Collector):
    """Shows what `collectors` collect. Numbers of the engine as a whole carry the name `model`."""

    def __init__(
        self, collectors: Sequence[Collector], model: str, engine_info: Callable[[], EngineInfo | None]
    ) -> None:
        self._collectors = collectors
        self._engine_info = engine_info
        self._labels = {"model_name": model, "engine": "0"}

    def collect(self) -> Iterable[Metric]:
        """The families that there are now; those of the engine are missing while it loads."""
        families = {family.name: family for each in self._collectors for family in each.collect()}
        for name, ours in OURS.items():
            if ours in families:
                yield self._renamed(families[ours], PREFIX + name)
        if _USED in families and _TOTAL in families:
            used, total = (families[name].samples[0].value for name in (_USED, _TOTAL))
            name = f"{PREFIX}kv_cache_usage_perc"
            share = GaugeMetricFamily(name, "Share of the KV pages in use", labels=list(self._labels))
            share.add_metric(list(self._labels.values()), used / total if total else 0.0)
            yield share
        if _REFUSED in families:
            yield self._rejections(families[_REFUSED])
        info = self._engine_info()
        if info is not None:
            yield self._cache_config(info)

    def _rejections(self, refused: Metric) -> Metric:
        """Requests that found the queue full; what keys may not is none of vLLM's reasons."""
        text = "Requests refused because the queue was full"
        family = CounterMetricFamily(f"{PREFIX}admission_rejections", text, labels=[*self._labels, "reason"])
        num_refused = sum(
            each.value
            for each in refused.samples
            if each.labels.get("what") in ("queue", "bodies") and each.name.endswith("_total")
        )
        family.add_metric([*self._labels.values(), _QUEUE_FULL], num_refused)
        return family

    def _cache_config(self, info: EngineInfo) -> Metric:
        """Always 1; balancers that count cached blocks read its labels."""
        labels = {"engine": "0", "block_size": str(info.page_size), "num_gpu_blocks": str(info.num_pages)}
        family = GaugeMetricFamily(f"{PREFIX}cache_config_info", "Facts of the KV cache", labels=list(labels))
        family.add_metric(list(labels.values()), 1.0)
        return family

    def _renamed(self, family: Metric, name: str) -> Metric:
        renamed = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            labels = self._labels | {_LABELS.get(key, key): value for key, value in sample.labels.items()}
            renamed.samples.append(Sample(name + sample.name.removeprefix(family.name), labels, sample.value))
        return renamed
