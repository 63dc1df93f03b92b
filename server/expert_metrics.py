"""Prometheus series about the use of experts: a bounded number for each MoE layer, whatever the number of experts."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.types import ExpertLoad
from server.experts import busiest


class ExpertCollector(Collector):
    """Shows the counters that the engine has last sent; nothing where it counts nothing."""

    def __init__(self, prefix: str, expert_load: Callable[[], ExpertLoad | None]) -> None:
        self._prefix = prefix
        self._expert_load = expert_load

    def collect(self) -> Iterable[Metric]:
        """The families, as the registry asks for them."""
        load = self._expert_load()
        if load is None:
            return
        prefix, layer = self._prefix, ["layer"]
        tokens = CounterMetricFamily(f"{prefix}_expert_tokens", "Tokens times experts of each", labels=layer)
        ratio = GaugeMetricFamily(
            f"{prefix}_expert_max_over_mean",
            "Tokens of the busiest expert over the mean, since the start",
            labels=layer,
        )
        rank_ratio = GaugeMetricFamily(
            f"{prefix}_expert_rank_max_over_mean",
            "The same of expert-parallel ranks, with the placement of now",
            labels=layer,
        )
        which = GaugeMetricFamily(
            f"{prefix}_expert_busiest",
            "Number of the expert at this place, 1 is the busiest",
            labels=["layer", "place"],
        )
        share = GaugeMetricFamily(
            f"{prefix}_expert_busiest_share", "Its share of the layer's tokens", labels=["layer", "place"]
        )
        for number, row, of_ranks in zip(load.layers, load.rows(), load.rank_ratios, strict=True):
            name, total = str(number), sum(row)
            tokens.add_metric([name], total)
            ratio.add_metric([name], max(row) * len(row) / total if total else 1.0)
            rank_ratio.add_metric([name], of_ranks)
            for place, expert in enumerate(busiest(row), 1):
                which.add_metric([name, str(place)], expert)
                share.add_metric([name, str(place)], row[expert] / total if total else 0.0)
        yield from (tokens, ratio, rank_ratio, which, share)
        yield CounterMetricFamily(f"{prefix}_expert_moves", "Experts that have changed their place", load.num_moves)
