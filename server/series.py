"""Counters and histograms that keep their numbers in a `Tally`, and show them as Prometheus families."""

import math
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from server.tally import Tally

_SEPARATOR = "\0"  # no command line value, header or route holds it
_SUM = "sum"
_MAX_LATE_S = 1.0  # how late numbers that are observed together may be shown


class Counter:
    """A number that only grows, for each combination of its labels. Without labels it is shown from the start."""

    def __init__(self, tally: Tally, name: str, text: str, label_names: Sequence[str] = ()) -> None:
        self._tally = tally
        self.name = name
        self._text = text
        self._label_names = label_names

    def inc(self, *labels: str, by: float = 1) -> None:
        """Add to the number with these labels."""
        self._tally.add(_SEPARATOR.join((self.name, *labels)), by)

    def family(self, series: Mapping[tuple[str, ...], float]) -> Metric:
        """The family, from all its numbers by labels."""
        family = CounterMetricFamily(self.name, self._text, labels=self._label_names)
        for labels, value in (series or ({} if self._label_names else {(): 0.0})).items():
            family.add_metric(labels, value, created=self._tally.started_s)
        return family


class Histogram:
    """How often a number fell into which of the buckets, which are upper bounds, for each combination of labels."""

    def __init__(
        self, tally: Tally, name: str, text: str, label_names: Sequence[str], buckets: Sequence[float]
    ) -> None:
        self._tally = tally
        self.name = name
        self._text = text
        self._label_names = label_names
        self._bounds = (*map(float, buckets), math.inf)
        self._keys: dict[
            tuple[str, ...], list[str]
        ] = {}  # of the tally, by labels; joining them each time takes longer
        self._together: dict[tuple[str, ...], ObservedTogether] = {}

    def observe(self, *labels: str, value: float, count: int = 1) -> None:
        """Count one number, or `count` equal ones."""
        keys = self._keys_of(labels)
        self._tally.add(keys[bisect_left(self._bounds, value)], count)
        self._tally.add(keys[-1], count * value)

    def together(self, label: str, clock: Callable[[], float]) -> "ObservedTogether":
        """Numbers with this label that are counted together; always the same object for a label."""
        found = self._together.get((label,))
        if found is None:
            found = self._together[(label,)] = ObservedTogether(self, label, clock)
        return found

    def observe_all(self, *labels: str, values: Sequence[float]) -> None:
        """Count many numbers, which takes less time for each than `observe`."""
        keys = self._keys_of(labels)
        for place, count in Counts([bisect_left(self._bounds, value) for value in values]).items():
            self._tally.add(keys[place], count)
        self._tally.add(keys[-1], sum(values))

    def family(self, series: Mapping[tuple[str, ...], float]) -> Metric:
        """The family, from all its numbers by labels and bucket."""
        family = HistogramMetricFamily(self.name, self._text, labels=self._label_names)
        for labels in dict.fromkeys(key[:-1] for key in series):
            buckets, count = [], 0.0
            for bound in map(_text_of, self._bounds):
                count += series.get((*labels, bound), 0.0)
                buckets.append((bound, count))
            family.add_metric(labels, buckets, series.get((*labels, _SUM), 0.0))
            names = dict(zip(self._label_names, labels, strict=True))
            family.add_sample(f"{self.name}_created", names, self._tally.started_s)
        return family

    def _keys_of(self, labels: tuple[str, ...]) -> list[str]:
        keys = self._keys.get(labels)
        if keys is None:
            parts = (*map(_text_of, self._bounds), _SUM)
            keys = self._keys[labels] = [_SEPARATOR.join((self.name, *labels, part)) for part in parts]
        return keys


class ObservedTogether:
    """Numbers of a histogram that are counted together, to save time. Whoever adds to `values` calls `observe` if the
    time is past `due_s`.
    """

    __slots__ = ("_clock", "_histogram", "_label", "due_s", "values")

    def __init__(self, histogram: Histogram, label: str, clock: Callable[[], float]) -> None:
        self._histogram = histogram
        self._label = label
        self._clock = clock
        self.values: list[float] = []
        self.due_s = clock() + _MAX_LATE_S

    def observe(self) -> None:
        """Count them now."""
        self.due_s = self._clock() + _MAX_LATE_S
        if self.values:
            self._histogram.observe_all(self._label, values=self.values)
            self.values.clear()


def families(metrics: Iterable[Counter | Histogram], totals: Mapping[str, float]) -> list[Metric]:
    """All families, from the totals of a tally."""
    by_name: dict[str, dict[tuple[str, ...], float]] = {}
    for key, value in totals.items():
        name, *labels = key.split(_SEPARATOR)
        by_name.setdefault(name, {})[tuple(labels)] = value
    return [metric.family(by_name.get(metric.name, {})) for metric in metrics]


def _text_of(bound: float) -> str:
    return "+Inf" if bound == math.inf else repr(bound)
