"""The self-check runs every launch plan: intact layers pass, and a fault in the code of one plan is found and named."""

from typing import Any

import pytest

from tests.interpreter import run_interpreted

pytestmark = pytest.mark.timeout(330)  # the first test waits for one process, 300 s at most

DIRECT = "direct plan 8 x 64 (up to 4 tokens); the tolerance is 0.015"
BY_EXPERT = "direct plan 16 x 128 (up to 32 tokens); the tolerance is 0.015"
GROUPED = "grouped plan 64 x 128 (up to 64 tokens); the tolerance is 0.015"
FP8 = "grouped plan 16 x 128 (FP8 activations, any number of tokens); the tolerance is 0.08"


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What was said of every case, all from one interpreter process."""
    result: dict[str, Any] = run_interpreted("tests.moe.kernels.interpreted_probes")
    return result


def test_intact_layers_pass_each_plan_by_its_own_tolerance(told: dict[str, Any]) -> None:
    error, tolerance = told["intact"]
    assert tolerance == 0.015, "what came nearest to its tolerance"
    assert 0 < error < tolerance
    error, tolerance = told["intact, FP8 activations alone"]
    assert tolerance == 0.08
    assert 0 < error < 0.04
    error, tolerance = told["intact behind DeepEP"]
    assert 0 < error < tolerance, "masked rows take no direct plan, so none is held to the tolerance of bf16 there"


def test_a_fault_in_the_code_of_one_plan_is_named(subtests: pytest.Subtests, told: dict[str, Any]) -> None:
    for case, words in [
        ("is_direct", f"none/fp8_block: expert 0 differs{{}}{DIRECT}"),
        ("grouped", f"none/fp8_block: expert 0 differs{{}}{GROUPED}"),
        ("FP8 activations", f"none/fp8_block: expert {{}} differs{{}}{FP8}"),
        ("second tile of a direct plan", f"none/fp8_block: expert 0 differs{{}}{BY_EXPERT}"),
        ("whole tile", f"none/fp8_block: expert 0 differs{{}}{GROUPED}"),
        ("half a tile", f"none/fp8_block: expert {{}} differs{{}}{GROUPED}"),
        ("direct behind DeepEP", "deepep/fp8_block (deepep_normal): expert 0 differs{}8 x 64 (up to 8 tokens)"),
        ("masked rows", f"deepep/fp8_block (deepep_ll): expert {{}} differs{{}}{FP8}"),
        ("wrong scale", f"none/fp8_block: expert 3 differs{{}}{GROUPED}"),
    ]:
        with subtests.test(case=case, words=words):
            text = told[case]
            assert text.startswith("layer 1, triton/"), text
            for part in words.split("{}"):
                _, found, text = text.partition(part)
                assert found, (told[case], part)


def test_tuning_holds_every_plan_to_the_tolerance_of_the_self_check(told: dict[str, Any]) -> None:
    for right in ("tuning grouped", "tuning FP8 activations"):
        assert 0.05 < told[right] < 1
    for case, error in told.items():
        if case.startswith(("tuning a wrong", "tuning wrong")):
            assert 1 < error < 4, case
