"""How many steps computed how many tokens, and their sums over ranks."""

from engine.step_sizes import STEP_TOKENS, StepSizes
from engine.types import EngineStats, sum_stats


def test_a_step_is_counted_in_the_bucket_whose_bound_it_does_not_exceed():
    sizes = StepSizes()
    for num_tokens in (1, 2, 8, 9, STEP_TOKENS[-1], STEP_TOKENS[-1] + 1):
        sizes.note(num_tokens)
    assert sizes.counts == [1, 2, 1, *[0] * 9, 1, 1]
    assert sizes.num_tokens == 20 + 2 * STEP_TOKENS[-1] + 1


def test_ranks_are_summed_bucket_by_bucket():
    names = [name for name in EngineStats.__struct_fields__ if name.startswith("num_")]
    one, two = (EngineStats(**dict.fromkeys(names, value), step_sizes=[value, 0, 1]) for value in (2, 5))
    assert sum_stats([one, two]) == EngineStats(**dict.fromkeys(names, 7), step_sizes=[7, 0, 2])
