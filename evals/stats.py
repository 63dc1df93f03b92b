"""What scores of a run, or of two runs over the same items, say beyond noise. Standard library only."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

ROUNDS = 4000  # of a bootstrap: an end of a 95 % interval then moves by a few per cent of its width
_Z_95 = 1.959964


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of scores between 0 and 1: Wilson's for right or wrong, else a bootstrap's.

    Raises:
        ValueError: there are no scores.
    """
    if not scores:
        raise ValueError("there is no mean of no scores")
    if all(score in (0, 1) for score in scores):
        return wilson(sum(score == 1 for score in scores), len(scores))
    return _middle(_resampled_means(scores))


def wilson(num_right: int, num_items: int) -> tuple[float, float]:
    """95 % interval of a share; unlike the usual plus or minus it never leaves 0 to 1, and is not empty at either."""
    share, z2 = num_right / num_items, _Z_95**2
    middle = share + z2 / (2 * num_items)
    half = _Z_95 * math.sqrt(share * (1 - share) / num_items + z2 / (4 * num_items**2))
    low, high = ((middle + sign * half) / (1 + z2 / num_items) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


def sign_test(num_first: int, num_second: int) -> float:
    """Two-sided exact p of so uneven a split, were both sides as likely; over right or wrong it is McNemar's test."""
    num = num_first + num_second
    tail = sum(math.comb(num, count) for count in range(min(num_first, num_second) + 1))
    return min(1.0, 2 * tail / 2**num)


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Second run minus first: mean difference, its 95 % interval, how many items changed, and the test's p."""

    test: str
    difference: float
    low: float
    high: float
    num_better: int
    num_worse: int
    p: float


def paired(first: Sequence[float], second: Sequence[float]) -> Paired:
    """Compare the scores of the same items in two runs.

    Right or wrong: McNemar's exact test of the items that changed. Other scores: p is from a paired bootstrap, twice
    the share of resampled mean differences on the far side of 0, at least 1 / ROUNDS.

    Raises:
        ValueError: the runs have different numbers of items, or none.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"{len(first)} and {len(second)} scores cannot be paired")
    differences = [b - a for a, b in zip(first, second, strict=True)]
    num_better, num_worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    means = _resampled_means(differences)
    low, high = _middle(means)
    if all(score in (0, 1) for score in (*first, *second)):
        test, p = "McNemar, exact", sign_test(num_better, num_worse)
    else:
        far = min(sum(mean <= 0 for mean in means), sum(mean >= 0 for mean in means))
        test, p = "paired bootstrap", min(1.0, max(1, 2 * far) / ROUNDS)
    mean = math.fsum(differences) / len(differences)
    return Paired(test=test, difference=mean, low=low, high=high, num_better=num_better, num_worse=num_worse, p=p)


def _resampled_means(values: Sequence[float]) -> list[float]:
    """Sorted means of samples drawn with replacement; the same ones every time."""
    if len(set(values)) == 1:
        return [values[0]] * ROUNDS
    draw = random.Random(0)
    return sorted(sum(draw.choices(values, k=len(values))) / len(values) for _ in range(ROUNDS))


def _middle(means: Sequence[float]) -> tuple[float, float]:
    """Where the middle 95 % of sorted numbers begin and end."""
    cut = len(means) // 40
    return means[cut], means[-cut - 1]
