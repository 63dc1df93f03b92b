"""The self-check runs every launch plan: intact layers pass, and a fault in the code of one plan is found and named."""

import pytest

from tests.interpreter import SLOW_PARTS, RunInterpreted, waits_for_interpreter

NUM_CASES = {"pick": 8, "rest": 10}


@waits_for_interpreter
@pytest.mark.parametrize("part", SLOW_PARTS)
def test_every_plan_is_held_to_its_tolerance_and_a_fault_names_it(part: str, run_interpreted: RunInterpreted) -> None:
    wrong = run_interpreted("tests.moe.kernels.interpreted_probes", part)
    assert len(wrong) == NUM_CASES[part]
    assert {case: what for case, what in wrong.items() if what} == {}
