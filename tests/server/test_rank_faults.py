"""What follows if a process of several ranks breaks: some rows of `python -m tests.server.rank_faults`, its record."""

import json

import pytest

from tests.server.rank_faults import Fault, Seen, complaints, faults, see, table
from tests.server.service_process import ROOT

RECORD = ROOT / "benchmarks" / "results" / "rank_faults_cpu.json"
KEYS = ("layout", "victim", "how")
PICK = [
    Fault("tp2", "rank 1", "stop"),
    Fault("tp2", "rank 0", "missing"),
    Fault("tp2", "supervisor", "kill"),
    Fault("tp2", "HTTP process", "kill"),
    Fault("dp2", "service", "pause"),
    Fault("dp2", "HTTP process", "kill"),
    Fault("dp2", "rank 1", "hang"),
    Fault("tp2-dp2", "rank 3", "kill"),
]


@pytest.mark.ranks
@pytest.mark.parametrize("fault", PICK, ids=lambda fault: f"{fault.layout}-{fault.victim}-{fault.how}")
def test_a_broken_process_has_the_outcome_of_the_table(tmp_path, fault):
    seen = see(fault, tmp_path / "service")
    assert complaints(fault, seen) == [], seen


def test_the_page_has_the_recorded_table():
    rows = []
    for row in json.loads(RECORD.read_text())["rows"]:
        fault = Fault(*(row.pop(key) for key in KEYS))
        rows.append((fault, Seen(**row)))
        assert complaints(*rows[-1]) == []
    assert [fault for fault, _ in rows] == faults()
    assert table(rows) in (ROOT / "docs" / "ranks.md").read_text()
