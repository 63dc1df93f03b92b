"""A short pick of the soak test. The limits are wide, since the machine may be busy: `make soak` is the real one."""

import pytest

from tests.soak.run import Plan, soak


@pytest.mark.processes
def test_unruly_clients_lose_nothing_and_leave_nothing_behind_g80_g81(tmp_path):
    plan = Plan(
        seconds=2.5, warm_up_seconds=0.5, rest_seconds=0, num_clients=16, seed=3, max_liveness_s=5.0, max_growth=2.0
    )
    result = soak(plan, tmp_path)
    assert result.faults == []
    assert set(result.numbers["actions"]) >= {"whole", "stream", "leave_stream", "large_body", "malformed"}
    assert "Traceback" not in (tmp_path / "err").read_text()
