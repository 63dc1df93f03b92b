"""Tuning policy: which token counts are tuned, who decides, when to stop, what is cached. Independent of libraries.

Tuning chooses tactics inside one backend, on the local shape after dispatch and without the transport, so no rank waits
for another during a measurement. If any rank misses its cache, all ranks tune together. The slowest rank's time counts;
rank 0 decides, watches the clock, tells the others and writes to disk.
"""

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moe.backend import Tactic, TacticTable
from moe.config import MoeA2ABackend, MoeBackend
from moe.errors import MoeConfigError
from moe.group import Group
from moe.registry import load_backend
from moe.tune.cache import TuneKey, TuningCache

MAX_TOKEN_COUNTS = 8
BUDGET_S = 50.0  # under a minute, including the measurement that runs when the time is up
_MEASURE_SHARE = 0.8  # of the budget; the rest is for comparing the winners with the reference
_WARM_UP_SHARE = 0.5  # of the time left, before each round of measurements

logger = logging.getLogger(__name__)


def should_autotune(backend: MoeBackend, a2a: MoeA2ABackend) -> bool:
    """Whether a backend has tactics to choose from with this transport."""
    return a2a in load_backend(backend).tunable_with


def tuning_token_counts(max_num_batched_tokens: int, max_num_seqs: int) -> tuple[int, ...]:
    """At most eight token counts: 1, the largest decode batch, the largest step, and powers of two spread between.

    The arguments are the scheduler's limits, so every possible step has a tactic and nothing larger is measured.
    """
    if not 1 <= max_num_seqs <= max_num_batched_tokens:
        raise MoeConfigError(
            f"max_num_seqs is {max_num_seqs}: it must lie between 1 and max_num_batched_tokens {max_num_batched_tokens}"
        )
    to_decode, to_step = math.log2(max_num_seqs), math.log2(max_num_batched_tokens)
    num_gaps = MAX_TOKEN_COUNTS - 1
    num_decode = round(num_gaps * to_decode / to_step) if to_step else 0
    if 1 < max_num_seqs < max_num_batched_tokens:
        num_decode = min(max(num_decode, 1), num_gaps - 1)
    counts = {1, max_num_seqs, max_num_batched_tokens}
    for low, high, gaps in ((0.0, to_decode, num_decode), (to_decode, to_step, num_gaps - num_decode)):
        powers = (1 << round(low + (high - low) * gap / gaps) for gap in range(1, gaps))
        counts |= {power for power in powers if low < math.log2(power) < high}
    return tuple(sorted(counts))


Batch = Sequence[tuple[Tactic, int]]


def _no_warm_up(batch: Batch, seconds: float) -> Batch:
    del batch, seconds
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Callbacks to tune one layer; all run this rank's experts only.

    propose(num_tokens, measured): the next tactics (see `Backend.tactics`).
    measure(tactic, num_tokens): seconds, infinite if the tactic does not run.
    error(tactic, num_tokens): error against the reference as a fraction of the tolerance; NaN counts as infinite.
    warm_up(batch, seconds): compiles a batch of tactics; returns those it had no time for, which are left out.
    """

    key: TuneKey
    propose: Callable[[int, Mapping[Tactic, float]], Sequence[Tactic]]
    measure: Callable[[Tactic, int], float]
    error: Callable[[Tactic, int], float]
    warm_up: Callable[[Batch, float], Batch] = _no_warm_up


def kept_choice(key: TuneKey, cache: TuningCache, ranks: Group) -> TacticTable | None:
    """Rank 0's cached choice if every rank has one, else None on every rank. Measures nothing."""
    kept = cache.load(key)
    anyone_misses = ranks.max([float(kept is None)])[0] > 0
    return None if anyone_misses else ranks.broadcast(kept)


def tune(
    tuning: Tuning,
    cache: TuningCache,
    ranks: Group,
    *,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.monotonic,
) -> TacticTable:
    """The cached choice, or a new one that all ranks measure together and rank 0 writes.

    When the budget is spent, the remaining tactics are left out, with a warning; a token count without any measurement
    stays untuned. If nothing was measured at all, nothing is written, so that a later run can try again.

    Raises:
        MoeConfigError: at one of the token counts, no tactic agrees with the reference.
    """
    kept = kept_choice(tuning.key, cache, ranks)
    if kept is not None:
        return kept
    seconds = _measure_all(tuning, ranks, clock() + _MEASURE_SHARE * budget_s, clock)
    choice = {str(count): _best(tuning, count, seconds[count], ranks) for count in tuning.key.token_counts}
    was_measured = any(time_s < math.inf for times in seconds.values() for time_s in times.values())
    cache.store(tuning.key, choice, on_disk=was_measured and ranks.rank == 0)
    return choice


def _measure_all(
    tuning: Tuning, ranks: Group, end: float, clock: Callable[[], float]
) -> dict[int, dict[Tactic, float]]:
    """Seconds on the slowest rank by token count and tactic, round after round until nothing more is proposed."""
    seconds: dict[int, dict[Tactic, float]] = {count: {} for count in tuning.key.token_counts}
    left_out: list[tuple[Tactic, int]] = []
    while batch := _next_batch(tuning, seconds):
        cold = set(tuning.warm_up(batch, max(0.0, _WARM_UP_SHARE * (end - clock()))))
        is_cold = ranks.max([float(entry in cold) for entry in batch])
        for (tactic, num_tokens), cold_somewhere in zip(batch, is_cold, strict=True):
            if cold_somewhere or not ranks.broadcast(clock() < end):
                left_out.append((tactic, num_tokens))
                seconds[num_tokens][tactic] = math.inf
            else:
                seconds[num_tokens][tactic] = ranks.max([tuning.measure(tactic, num_tokens)])[0]
    if left_out and ranks.rank == 0:
        tactic, num_tokens = left_out[0]
        logger.warning("%s: the time for tuning is up, %d tactics are left out (%s at %d tokens and others)",
                       tuning.key.backend, len(left_out), tactic, num_tokens)  # fmt: skip
    return seconds


def _next_batch(tuning: Tuning, seconds: Mapping[int, Mapping[Tactic, float]]) -> list[tuple[Tactic, int]]:
    """Proposals not measured yet, round-robin over token counts, because time may run out at any point."""
    columns = [
        [(tactic, count) for tactic in tuning.propose(count, measured) if tactic not in measured]
        for count, measured in seconds.items()
    ]
    return [entry for row in itertools.zip_longest(*columns) for entry in row if entry is not None]


def _best(tuning: Tuning, num_tokens: int, seconds: Mapping[Tactic, float], ranks: Group) -> Tactic:
    """The fastest tactic, by the slowest rank's time, that is correct on every rank; the untuned one comes last."""
    order = sorted((tactic for tactic, time_s in seconds.items() if time_s < math.inf), key=seconds.__getitem__)
    untuned = tuning.propose(num_tokens, {})[0]
    for tactic in ranks.broadcast(list(dict.fromkeys([*order, untuned]))):
        error = tuning.error(tactic, num_tokens)
        worst = ranks.max([math.inf if math.isnan(error) else error])[0]
        if worst <= 1:
            return tactic
        if ranks.rank == 0:
            logger.warning(
                "%s: tactic %s is off by %.3g times its tolerance at %d tokens and is not used",
                tuning.key.backend,
                tactic,
                worst,
                num_tokens,
            )
    raise MoeConfigError(
        f"--moe-backend {tuning.key.backend}: no tactic stays within its tolerance at {num_tokens} tokens"
    )
