"""The self-check runs every launch plan: intact layers pass, and a fault in the code of one plan is found and named."""

from typing import Any

import pytest

from tests.interpreter import SLOW_PARTS, RunInterpreted, waits_for_interpreter

DIRECT = "direct plan 8 x 64 (up to 4 tokens); the tolerance is 0.015"
BY_EXPERT = "direct plan 16 x 128 (up to 32 tokens); the tolerance is 0.015"
GROUPED = "grouped plan 64 x 128 (up to 64 tokens); the tolerance is 0.015"
FP8 = "grouped plan 16 x 128 (FP8 activations, any number of tokens); the tolerance is 0.08"


NUM_CASES = {"pick": 8, "rest": 10}
INTACT = {
    "intact": (0, 0.015, 0.015),
    "intact, FP8 activations alone": (0, 0.04, 0.08),
    "intact behind DeepEP": (0, 0.015, 0.015),
}
# By case what the message begins with; where a group of tokens may decide, it stands as {}.
FAULTS = {
    "is_direct": f"none/fp8_block: expert 0 differs{{}}{DIRECT}",
    "grouped": f"none/fp8_block: expert 0 differs{{}}{GROUPED}",
    "FP8 activations": f"none/fp8_block: expert {{}} differs{{}}{FP8}",
    "second tile of a direct plan": f"none/fp8_block: expert 0 differs{{}}{BY_EXPERT}",
    "whole tile": f"none/fp8_block: expert 0 differs{{}}{GROUPED}",
    "half a tile": f"none/fp8_block: expert {{}} differs{{}}{GROUPED}",
    "direct behind DeepEP": "deepep/fp8_block (deepep_normal): expert 0 differs{}8 x 64 (up to 8 tokens)",
    "masked rows": f"deepep/fp8_block (deepep_ll): expert {{}} differs{{}}{FP8}",
    "wrong scale": f"none/fp8_block: expert 3 differs{{}}{GROUPED}",
}


def check_fault(case: str, text: str) -> None:
    """The parts of the expected message stand in this one, in order."""
    rest = text
    for part in f"layer 1, triton/{FAULTS[case]}".split("{}"):
        _, found, rest = rest.partition(part)
        assert found, (text, part)


@waits_for_interpreter
@pytest.mark.parametrize("part", SLOW_PARTS)
def test_every_plan_is_held_to_its_tolerance_and_a_fault_names_it(
    subtests: pytest.Subtests, part: str, run_interpreted: RunInterpreted
) -> None:
    told: dict[str, Any] = run_interpreted("tests.moe.kernels.interpreted_probes", part)
    assert len(told) == NUM_CASES[part]
    for case, result in told.items():
        with subtests.test(case=case):
            if case in FAULTS:
                check_fault(case, result)
            elif case.startswith(("tuning a wrong", "tuning wrong")):
                assert 1 < result < 4
            elif case.startswith("tuning"):
                assert 0.05 < result < 1
            else:  # an intact layer: error and tolerance of what came nearest to its tolerance
                low, high, tolerance = INTACT[case]
                assert low < result[0] < high
                assert result[1] == tolerance
