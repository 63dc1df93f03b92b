"""Statistics against values from the literature, or counted by hand."""

import pytest

from evals.stats import interval, paired, sign_test, wilson
from tests.tables import rows


@rows(
    "right, total, low, high",
    (0, 10, 0.0, 0.2775),  # Newcombe 1998, and any table of Wilson's interval
    (81, 263, 0.2553, 0.3662),
    (15, 148, 0.0624, 0.1605),
    (1, 29, 0.0061, 0.1718),
    (10, 10, 0.7225, 1.0),
)
def test_wilsons_interval(right: int, total: int, low: float, high: float) -> None:
    assert wilson(right, total) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@rows("first, second, p", (0, 0, 1.0), (0, 1, 1.0), (0, 6, 0.03125), (1, 9, 22 / 1024), (4, 16, 0.01182), (5, 5, 1.0))
def test_the_sign_test_is_exact(first: int, second: int, p: float) -> None:
    assert sign_test(first, second) == sign_test(second, first) == pytest.approx(p, rel=1e-3)


def test_an_interval_of_scores_in_parts_comes_from_a_bootstrap_and_repeats() -> None:
    scores = [0.0, 0.25, 0.5, 0.75, 1.0] * 40
    low, high = interval(scores)
    assert (low, high) == interval(scores)
    half = 1.96 * (0.125 / 200) ** 0.5  # variance 1/8: the normal approximation holds for 200 items
    assert (low, high) == (pytest.approx(0.5 - half, abs=0.005), pytest.approx(0.5 + half, abs=0.005))


def test_scores_that_cannot_be_paired_or_averaged_are_refused() -> None:
    with pytest.raises(ValueError, match="2 and 1 scores"):
        paired([1, 1], [1])
    with pytest.raises(ValueError, match="no scores"):
        interval([])
