"""What the faults cost clients is printed, and with `--record` written to benchmarks/results."""

import json
from collections.abc import Callable, Iterator

import pytest

from benchmarks import record
from tests.balancer.load import CUT, DONE, EVENT, LOST, WHOLE, Load

Note = Callable[[str, Load, int], None]
"""`note(fault, load, num_retried)`"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write what the faults cost to benchmarks/results")


@pytest.fixture(scope="module")
def note(request: pytest.FixtureRequest) -> Iterator[Note]:
    """Keeps the figures of a fault. A record is written only of a module whose tests have all passed."""
    rows = []

    def keep(fault: str, load: Load, num_retried: int) -> None:
        ends = {end: load.ends[end] for end in (WHOLE, DONE, EVENT, CUT, LOST)}
        rows.append({"fault": fault, "requests": load.num_ended, "sent again by the balancer": num_retried} | ends)
        print(json.dumps(rows[-1]))

    failed = request.session.testsfailed
    yield keep
    if request.config.getoption("--record") and request.session.testsfailed == failed:
        what = "what the end of one of two replicas behind HAProxy costs 8 clients, half of which stream"
        record.write("balancer", record.environment() | {"note": what, "rows": rows})
