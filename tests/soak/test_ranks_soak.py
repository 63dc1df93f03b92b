"""Unruly clients against a service of two ranks that both schedule; `python -m tests.soak -- FLAGS` is the long one."""

import pytest

from tests.soak.run import Plan, soak

DP2 = ("--data-parallel-size", "2", "--expert-parallel-size", "2", "--device", "cpu")


@pytest.mark.ranks
def test_unruly_clients_of_two_ranks_lose_nothing(tmp_path):
    plan = Plan(
        seconds=10, warm_up_seconds=3, rest_seconds=0, num_clients=24, seed=5, max_liveness_s=5.0, max_growth=2.0,
        flags=DP2,
    )  # fmt: skip
    result = soak(plan, tmp_path)
    assert result.faults == []
    assert "Traceback" not in (tmp_path / "err").read_text()
