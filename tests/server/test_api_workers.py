"""`--api-workers 2`: two HTTP processes on one port and one engine look like one service from outside.

`make processes` runs more of these tests; `make api-workers` also runs the suites of the front door, fairness and
metrics with two processes.
"""

import json
import os
import re
import select
import signal
import socket
import time
from contextlib import ExitStack
from http.client import IncompleteRead
from pathlib import Path

import httpx2
import pytest

from server import cli
from tests.server import test_life
from tests.server.conftest import ASSETS, wait_until
from tests.server.service_process import API_WORKERS, SCRIPTED, free_port, has_ended, start
from tests.server.test_life import LONG
from tests.server.worker_connections import Connection, metrics, sockets_of, two_connections

TWO = ("--api-workers", "2")
LISTENS = "0A"  # a state in /proc/net/tcp
SHORT = {**LONG, "max_tokens": 2}
ENDLESS = {**LONG, "max_tokens": 500, "stream": True}  # five seconds and more


@pytest.fixture(autouse=True)
def _close_connections():
    yield
    while Connection.opened:
        Connection.opened.pop().close()


def listeners_at(port):
    """Inodes of the sockets that listen at a port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[3] == LISTENS and int(row[1].split(":")[1], 16) == port}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """With eight places. At its end nothing may be left."""
    argv = (*TWO, "--max-num-seqs", "4", "--max-queued-requests", "4")
    with start(tmp_path_factory.mktemp("two"), "slow", *argv) as service:
        assert service.url
        assert len(service.api_pids) == 2
        yield service
        pids = service.children
        service.signal(signal.SIGTERM)
        assert service.process.wait(30) == 0
        assert all(has_ended(pid) for pid in pids)
        assert "Traceback" not in service.err


def num_at_engine(http):
    stats = http.get("/health").json()["stats"]
    return stats and stats["num_running"] + stats["num_waiting"]  # None if this process was not told yet


def wait_until_idle(service):
    with service.http() as http:
        wait_until(lambda: http.get("/health").json()["stats"]["num_running"] == 0, 30)
        wait_until(lambda: metrics(http.get("/metrics").text)["moe_serve_requests_in_flight"] == 0, 30)


def test_connections_go_in_turn_to_who_has_the_fewest_open(service):
    connections = [Connection(service) for _ in range(6)]
    pids = [connection.pid for connection in connections]
    assert sorted(pids.count(pid) for pid in service.api_pids) == [3, 3]
    left = pids[0]
    for connection in connections:
        if connection.pid == left:
            connection.close()
    wait_until(lambda: len(sockets_of(service)) >= 3)
    time.sleep(0.1)  # the process notices that they have closed
    more = [Connection(service) for _ in range(3)]
    assert [connection.pid for connection in more] == [left] * 3


def test_metrics_are_those_of_the_service_whoever_is_asked(service):
    with two_connections(service) as (first, second):
        before = metrics(first.get("/metrics"))
        for connection in (first, second):
            assert connection.ask({**LONG, "max_tokens": 7}) == 200
            connection.rest()
        for connection in (first, second):
            after = metrics(connection.get("/metrics"))
            grown = {name: after[name] - before.get(name, 0.0) for name in after}
            assert grown["moe_serve_completion_tokens_total"] == 14
            assert grown["moe_serve_choices_finished_total"] == 2
            assert grown["moe_serve_request_seconds_count"] == 2
        for connection in (first, second):
            connection.ask(ENDLESS)
        with service.http() as http:
            wait_until(lambda: metrics(http.get("/metrics").text)["moe_serve_requests_in_flight"] == 2)
            wait_until(lambda: metrics(http.get("/metrics").text)["moe_serve_engine_running"] == 2)
    wait_until_idle(service)


def test_the_limit_holds_for_both_together(service):
    """Four streams at each process fill the eight places; then both refuse, and both take again."""
    with ExitStack() as stack:
        connections = [stack.enter_context(two_connections(service)) for _ in range(4)]
        for first, second in connections:
            assert (first.ask(ENDLESS), second.ask(ENDLESS)) == (200, 200)
        with two_connections(service) as late:
            for connection in late:
                assert connection.ask(LONG) == 429
                assert "the queue is full" in connection.rest()
                assert int(connection.answer.getheader("retry-after")) >= 1
    wait_until_idle(service)
    with two_connections(service) as later:
        assert [connection.ask({**LONG, "max_tokens": 1}) for connection in later] == [200, 200]
        assert len({re.search(r'"id":"([^"]+)"', connection.rest())[1] for connection in later}) == 2


def test_health_asks_the_service_by_its_flags(service, capsys):
    port = service.url.rpartition(":")[2]
    assert cli.main(["health", "--port", port, *TWO]) == 0
    assert '"alive"' in capsys.readouterr().out


@pytest.mark.processes
def test_a_client_of_one_process_overtakes_a_burst_at_the_other(tmp_path):
    """The real engine with two running requests and four places: the newcomer gets the burst's last place and turn."""
    argv = (*TWO, "--model", str(ASSETS), "--num-threads", "1", "--max-num-seqs", "2", "--max-queued-requests", "2")
    long = {**LONG, "prompt": [300], "max_tokens": 3000, "stream": True}
    with start(tmp_path, "slow", *argv) as service, service.http() as http:
        connections = [Connection(service, "burst") for _ in range(9)]
        burst = [each for each in connections if each.pid == connections[0].pid][:4]
        newcomer = next(each for each in connections if each.pid != connections[0].pid)
        newcomer.name = "newcomer"
        for index, connection in enumerate(burst):
            connection.send({**long, "max_tokens": 600} if index == 0 else long)
            wait_until(lambda count=index + 1: num_at_engine(http) == count, 30)
        newcomer.send({**long, "max_tokens": 300})
        assert burst[3].read_status() == 429  # at once, and at the other process
        assert newcomer.read_status() == 200
        readable, _, _ = select.select([burst[2].http.sock], [], [], 0)
        assert not readable, "the newcomer is next, although this one came earlier"
        assert (burst[0].read_status(), burst[1].read_status()) == (200, 200)


@pytest.mark.processes
def test_an_http_process_that_dies_is_replaced_and_nothing_is_lost(tmp_path):
    with start(tmp_path, "slow", *TWO) as service, two_connections(service) as (first, second):
        for connection in (first, second):
            assert connection.ask({**LONG, "max_tokens": 5}) == 200
            connection.rest()
        assert (first.ask(ENDLESS), second.ask({**ENDLESS, "max_tokens": 300})) == (200, 200)
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises((ConnectionError, IncompleteRead)):
            first.rest()
        wait_until(lambda: len(service.api_pids) == 2 and first.pid not in service.api_pids)
        assert "was killed by signal 9; another takes its place" in service.err
        assert second.rest().endswith("data: [DONE]\n\n")
        with service.http() as http:
            wait_until(lambda: http.get("/health").json()["stats"]["num_running"] == 0)
        pids = set()
        deadline_s = time.monotonic() + 30
        while pids != set(service.api_pids):
            assert time.monotonic() < deadline_s
            connection = Connection(service)
            pids.add(connection.pid)
            found = metrics(connection.get("/metrics"))
            assert found["moe_serve_completion_tokens_total"] == 5 + 5 + 300
            assert found["moe_serve_requests_in_flight"] == 0
        service.signal(signal.SIGTERM)
        assert service.process.wait(30) == 0


LATE = "import server.api_process; server.api_process._MODULE = 'tests.server.api_worker_late'" + SCRIPTED


def test_who_has_not_heard_that_the_engine_is_ready_gets_no_connection(tmp_path):
    """Neither at the start nor in the place of a process that died. Some requests used to get a 503, as while the model
    loads, although the service had said that it is ready.
    """
    port = free_port()
    held, let = (tmp_path / "slow" / name for name in ("held", "let"))

    def status(path, fields=None):
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, verify=False) as http:
            return (http.get(path) if fields is None else http.post(path, json=fields)).status_code

    def statuses():
        return {status("/v1/completions", SHORT) for _ in range(8)}

    with start(tmp_path, "slow", *TWO, "--port", str(port), code=LATE) as service:
        wait_until(held.exists, 30)
        wait_until(lambda: status("/health/ready") == 200)
        assert statuses() == {200}
        assert service.out == "", "the service says that it is ready once all processes are"
        let.touch()
        with two_connections(service) as (first, second):
            assert (first.ask(SHORT), second.ask(SHORT)) == (200, 200)
            left = first.pid
        let.unlink()
        held.unlink()
        os.kill(left, signal.SIGKILL)
        wait_until(held.exists, 30)
        assert statuses() == {200}
        let.touch()
        with two_connections(service) as (first, second):
            assert (first.ask(SHORT), second.ask(SHORT)) == (200, 200)
        service.signal(signal.SIGTERM)
        assert service.process.wait(30) == 0


def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path):
    with start(tmp_path, "slow", *TWO) as service:
        assert service.url
        pids = service.children
        assert len(pids) == 3
        listening = listeners_at(int(service.url.rpartition(":")[2]))
        assert listening
        service.signal(signal.SIGKILL)
        wait_until(lambda: all(has_ended(pid) for pid in pids))
        # By their sockets: another program may listen at this port by now. The killed one may still be closing its own.
        wait_until(lambda: not listening & listeners_at(int(service.url.rpartition(":")[2])))


BROKEN = "import server.api_process; server.api_process._MODULE = 'tests.no_such_module'" + SCRIPTED


def test_what_cannot_start_ends_the_service_with_status_1_or_2(tmp_path):
    """An HTTP process that dies before it serves, and an engine; 2 if a setting must be changed first."""
    with ExitStack() as stack:
        broken = stack.enter_context(start(tmp_path / "a", "slow", *TWO, code=BROKEN))
        missing = stack.enter_context(start(tmp_path / "b", "missing", *TWO))
        misset = stack.enter_context(start(tmp_path / "c", "misset", *TWO, "--log-format", "json"))
        assert (broken.process.wait(30), missing.process.wait(30), misset.process.wait(30)) == (1, 1, 2)
        assert re.search(r"HTTP process \d ended with status 1 before it could serve", broken.err)
        assert missing.err == "moe-serve: the engine cannot start: model is missing: no such folder\n"
        assert broken.out == missing.out == misset.out == ""
        record = json.loads(misset.err)  # text between lines of JSON would be lost
        assert (record["level"], record["logger"]) == ("error", "server.cli")
        assert record["message"] == "the engine cannot start: num_pages is 0: it must be at least 1"


def hang_and_stop(service, *, num_signals, within_s):
    """Stop one of the two processes, each of which has a stream, and end the service."""
    with two_connections(service) as (first, second):
        assert (first.ask(ENDLESS), second.ask(ENDLESS)) == (200, 200)
        os.kill(first.pid, signal.SIGSTOP)
        start_s = time.monotonic()
        for _ in range(num_signals):
            service.signal(signal.SIGTERM)
            time.sleep(0.1)
        assert service.process.wait(30) == 0
        assert time.monotonic() - start_s < within_s
        wait_until(lambda: has_ended(first.pid))


@pytest.mark.processes
def test_a_third_signal_and_a_hanging_http_process_do_not_hold_up_the_end(tmp_path):
    with ExitStack() as stack:
        third, hanging = (
            stack.enter_context(start(tmp_path / name, "slow", *TWO, "--drain-timeout", timeout))
            for name, timeout in (("a", "600"), ("b", "0.2"))
        )
        for service in (third, hanging):
            hang_and_stop(service, num_signals=3 if service is third else 1, within_s=5 if service is third else 12)
        assert "1 HTTP processes did not stop in time and were killed" in hanging.err


def test_a_stall_is_logged_once(tmp_path):
    with (
        start(tmp_path, "hang", *TWO, "--stall-timeout", "0.3") as service,
        two_connections(service) as (first, second),
    ):
        first.send({**LONG, "prompt": [66]})
        wait_until(lambda: "the engine stalls" in service.err)
        wait_until(lambda: '"not ready"' in second.get("/health/ready"))
        time.sleep(0.5)
        assert service.err.count("the engine stalls") == 1


def test_wrong_numbers_and_a_port_in_use_are_refused_once(capsys):
    for number in ("0", "65", "two"):
        assert cli.main(["--api-workers", number]) == 2
        assert "--api-workers" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["--port", port, *TWO]) == 1
    assert capsys.readouterr().err.count("cannot listen on") == 1


def test_a_signal_before_anything_is_served_ends_with_0(tmp_path):
    with start(tmp_path, "loading", *TWO) as service:
        wait_until(lambda: len(service.api_pids) == 2, 30)
        pids = service.children
        service.signal(signal.SIGTERM)
        assert service.process.wait(30) == 0
        assert all(has_ended(pid) for pid in pids)
    assert service.out == ""


ENDS = [
    test_life.test_a_second_sigterm_ends_requests_with_a_503_g86,
    test_life.test_an_engine_that_dies_ends_the_service_if_so_set_g82,
]


@pytest.mark.processes
@pytest.mark.parametrize("row", ENDS, ids=lambda row: row.__name__.removeprefix("test_"))
def test_it_ends_as_one_process_does(row, tmp_path, monkeypatch):
    """Two rows of "How the service ends" in docs/architecture.md; `make api-workers` has them all."""
    monkeypatch.setenv(API_WORKERS, "2")
    row(tmp_path)


def test_a_request_is_aborted_through_the_other_process(service):
    with two_connections(service) as (first, second):
        assert first.ask({**ENDLESS, "timeout": 60}) == 200
        name = first.answer.getheader("x-request-id")
        headers = {"content-type": "application/json"}
        second.http.request("POST", "/abort_request", json.dumps({"rid": name}), headers)
        answer = second.http.getresponse()
        assert (answer.status, json.loads(answer.read())) == (200, {"status": "accepted"})
        assert '"code":"aborted"' in first.rest().rpartition("data: ")[2]
    wait_until_idle(service)
