"""`VllmNames`: our metrics once more, under the names and labels of vLLM, which existing boards and alerts read.

Metrics of things that this service does not do, such as speculative decoding, have no counterpart.
"""

from collections.abc import Iterable, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

PREFIX = "vllm:"

OURS: dict[str, str] = {
    "num_requests_running": "moe_serve_engine_running",
    "num_requests_waiting": "moe_serve_engine_waiting",
    "prefix_cache_queries": "moe_serve_engine_prompt_tokens",
    "prefix_cache_hits": "moe_serve_engine_cached_tokens",
    "num_preemptions": "moe_serve_engine_preemptions",
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
"""vLLM's name without its prefix, and ours. `kv_cache_usage_perc` is computed from two of ours."""

_LABELS = {"model": "model_name", "reason": "finished_reason"}
_USED, _TOTAL = "moe_serve_engine_pages_used", "moe_serve_engine_pages_total"


class VllmNames(Collector):
    """Shows what `collectors` collect. Numbers of the engine as a whole carry the name `model`."""

    def __init__(self, collectors: Sequence[Collector], model: str) -> None:
        self._collectors = collectors
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

    def _renamed(self, family: Metric, name: str) -> Metric:
        renamed = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            labels = self._labels | {_LABELS.get(key, key): value for key, value in sample.labels.items()}
            renamed.samples.append(Sample(name + sample.name.removeprefix(family.name), labels, sample.value))
        return renamed
