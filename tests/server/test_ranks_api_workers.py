"""Two HTTP processes over two data-parallel ranks of the bundled model look like one service from outside."""

import json
import os
import signal
import time
from contextlib import ExitStack
from http.client import HTTPException

import pytest

from tests.server.conftest import wait_until
from tests.server.rank_faults import DP2, everybody, ranks_of
from tests.server.service_process import has_ended, start_bundled
from tests.server.worker_connections import Connection, metrics, two_connections

pytestmark = pytest.mark.ranks

FLAGS = ("--device", "cpu", *DP2, "--api-workers", "2", "--max-num-seqs", "2", "--max-queued-requests", "1")
ENDLESS = {"prompt": [300], "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "stream": True}
SHORT = {**ENDLESS, "max_tokens": 7}


@pytest.fixture(autouse=True)
def _close_connections():
    yield
    while Connection.opened:
        Connection.opened.pop().close()


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """With six places, three a rank. At its end nothing may be left."""
    with start_bundled(tmp_path_factory.mktemp("two"), *FLAGS, "--expert-load") as service:
        wait_until_idle(service)
        yield service
        pids = everybody(service)
        service.signal(signal.SIGTERM)
        assert service.process.wait(30) == 0
        assert all(map(has_ended, pids))
        assert "Traceback" not in service.err


def stats_of(connection):
    """Counters of the engine; zeros before the first heartbeat."""
    return json.loads(connection.get("/health"))["stats"] or dict.fromkeys(("num_running", "num_waiting"), 0)


def wait_until_idle(service):
    """At both processes."""
    numbers = {"num_running": 0, "num_waiting": 0, "num_pages_used": 0}
    with two_connections(service) as both:
        for connection in both:
            wait_until(lambda each=connection: stats_of(each).items() >= numbers.items(), 30)
            wait_until(lambda each=connection: metrics(each.get("/metrics"))["moe_serve_requests_in_flight"] == 0, 30)


def test_both_answer_alike_and_everything_is_counted_once(service):
    with two_connections(service) as both:
        before = metrics(both[0].get("/metrics"))
        texts = set()
        for connection in both:
            assert connection.ask({**SHORT, "stream": False}) == 200
            texts.add(json.loads(connection.rest())["choices"][0]["text"])
        assert len(texts) == 1
        name = "moe_serve_engine_generated_tokens_total"
        for connection in both:
            # A heartbeat brings the engine's numbers.
            wait_until(lambda each=connection: metrics(each.get("/metrics"))[name] - before[name] >= 14, 30)
            after = metrics(connection.get("/metrics"))
            grown = {each: after[each] - before.get(each, 0.0) for each in after}
            assert grown["moe_serve_completion_tokens_total"] == grown[name] == 14
            assert grown["moe_serve_choices_finished_total"] == grown["moe_serve_request_seconds_count"] == 2
            assert grown["moe_serve_engine_prompt_tokens_total"] == 2
        health = [json.loads(each.get("/health"))["engine"] for each in both]
        assert [(each["max_requests"], each["device"]) for each in health] == [(6, "2 ranks (cpu)")] * 2
        loads = [json.loads(each.get("/expert_load")) for each in both]
        assert loads[0] == loads[1]
        assert loads[0]["layers"]


def test_the_ranks_are_kept_even_and_the_limit_holds_for_both_processes(service):
    with ExitStack() as stack:
        pairs = [stack.enter_context(two_connections(service)) for _ in range(3)]
        for first, second in pairs[:2]:
            assert (first.ask(ENDLESS), second.ask(ENDLESS)) == (200, 200)
        with two_connections(service) as observers:
            for each in observers:
                wait_until(lambda each=each: stats_of(each)["num_running"] == 4)  # two a rank: nobody waits
                assert stats_of(each)["num_waiting"] == 0
            for connection in pairs[2]:
                connection.send(ENDLESS)
            for each in observers:
                wait_until(lambda each=each: stats_of(each)["num_waiting"] == 2)
                assert each.ask(SHORT) == 429
                assert "the queue is full: 6 requests" in each.rest()
    wait_until_idle(service)


def test_a_client_of_one_process_takes_a_place_of_a_burst_at_the_other(service):
    connections = [Connection(service, "burst") for _ in range(16)]
    burst = [each for each in connections if each.pid == connections[0].pid][:6]
    newcomer = next(each for each in connections if each.pid != connections[0].pid)
    newcomer.name = "newcomer"
    for index, connection in enumerate(burst):
        connection.send({**ENDLESS, "max_tokens": 400})
        wait_until(lambda num=index + 1: sum(map(stats_of(newcomer).get, ("num_running", "num_waiting"))) == num, 30)
    newcomer.send(SHORT)
    statuses = sorted(each.read_status() for each in burst[:4])
    assert statuses == [200] * 4
    refused = sorted(each.read_status() for each in burst[4:])
    assert refused == [200, 429]
    assert newcomer.read_status() == 200
    for connection in connections:
        connection.close()
    wait_until_idle(service)


def test_requests_are_aborted_and_orders_given_through_either_process(service):
    with two_connections(service) as (first, second):
        for asking, other in ((first, second), (second, first)):
            assert asking.ask(ENDLESS) == 200
            headers = {"content-type": "application/json"}
            body = json.dumps({"rid": asking.answer.getheader("x-request-id")})
            other.http.request("POST", "/abort_request", body, headers)
            assert json.loads(other.http.getresponse().read()) == {"status": "accepted"}
            assert '"code":"aborted"' in asking.rest().rpartition("data: ")[2]
        for connection in (first, second):
            connection.http.request("POST", "/reset_prefix_cache")
            assert json.loads(connection.http.getresponse().read()) == {"status": "done"}
    wait_until_idle(service)


def test_an_http_process_that_dies_is_replaced_and_frees_both_ranks(tmp_path):
    with start_bundled(tmp_path, *FLAGS) as service:
        wait_until_idle(service)
        connections = [Connection(service) for _ in range(8)]
        [*lost, kept] = sorted(connections, key=lambda each: each.pid != connections[0].pid)[:5]
        assert {each.pid for each in lost} != {kept.pid}
        for connection in lost:
            assert connection.ask(ENDLESS) == 200
        assert kept.ask({**ENDLESS, "max_tokens": 100}) == 200  # after one of the others, if need be
        os.kill(lost[0].pid, signal.SIGKILL)
        for connection in lost:
            with pytest.raises((ConnectionError, HTTPException)):
                connection.rest()
        assert kept.rest().endswith("data: [DONE]\n\n")
        wait_until(lambda: len(service.api_pids) == 2 and lost[0].pid not in service.api_pids)
        wait_until_idle(service)
        with two_connections(service) as both:
            for connection in both:
                wait_until(lambda each=connection: '"ready"' in each.get("/health"), 30)
                assert connection.ask(SHORT) == 200
                assert connection.rest().endswith("data: [DONE]\n\n")
                assert metrics(connection.get("/metrics"))["moe_serve_requests_in_flight"] == 0
        service.signal(signal.SIGTERM)
        assert service.process.wait(30) == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_is_told_to_the_clients_of_both_processes(rank, tmp_path):
    with start_bundled(tmp_path, *FLAGS) as service:
        wait_until_idle(service)
        with two_connections(service) as one, two_connections(service) as other:
            streams = [*one, *other]
            for connection in streams:
                assert connection.ask(ENDLESS) == 200
            pids, start_s = everybody(service), time.monotonic()
            os.kill(ranks_of(service)[rank], signal.SIGKILL)
            ends = [connection.rest().rpartition("data: ")[2] for connection in streams]
            assert time.monotonic() - start_s < 5
            assert all('"error"' in end for end in ends), ends
            assert service.process.wait(20) == 1
            assert all(map(has_ended, pids))
            assert f"the process of rank {rank} was killed by signal 9" in service.err
