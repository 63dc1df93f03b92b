"""What HTTP processes share: counters that no death loses, gauges that it resets, and one large body at a time."""

import asyncio
import fcntl
import os
import subprocess
import sys
import threading

import pytest
from starlette.requests import ClientDisconnect

from engine.types import EngineStats
from server.board import Board, SharedTally, Turn
from server.errors import TooManyRequests
from server.lanes import LARGE_BODY_BYTES, MAX_WAITING_LARGE, Lanes
from server.metrics import Metrics
from server.tally import Gauge, OwnTally
from tests.server.conftest import wait_until


def test_counters_are_summed_over_slots_and_outlive_their_process():
    board = Board.create(2, ["model"])
    first, second = SharedTally(board, 0), SharedTally(board, 1)
    first.add("a", 2)
    first.add("only the first, with ü", 0)
    second.add("a", 0.5)
    assert first.totals() == second.totals() == {"a": 2.5, "only the first, with ü": 0.0}
    another = SharedTally(Board(board.descriptor, 2, board.started_s), 0)  # as in a process that takes its place
    another.add("a", 1)
    another.add("new", 1)
    assert second.totals() == {"a": 3.5, "only the first, with ü": 0.0, "new": 1.0}


def test_gauges_are_of_what_runs():
    board = Board.create(3, [])
    for index in range(3):
        SharedTally(board, index).set_gauge(Gauge.IN_FLIGHT, index + 1)
    assert SharedTally(board, 0).sum_gauge(Gauge.IN_FLIGHT) == 6
    board.reset_gauges(2)
    assert board.sum_gauge(Gauge.IN_FLIGHT) == 3
    assert board.sum_gauge(Gauge.LARGE_BODIES) == 0


def test_loads_of_schedulers_end_with_their_process_and_touch_nothing_else():
    board = Board.create(2, [], num_keys=1, num_schedulers=3)
    attached = Board(board.descriptor, 2, board.started_s, 1, 3)  # as in another process
    SharedTally(board, 1).add("a", 4)
    board.loads(0).add(2, num_requests=1, num_tokens=30)
    attached.loads(1).add(2, num_requests=2, num_tokens=50)
    attached.loads(1).add(0, num_requests=1, num_tokens=7)
    assert attached.loads(0).num_requests() == board.loads(1).num_requests() == [1, 0, 3]
    assert board.loads(0).num_tokens() == [7, 0, 80]
    assert not any(board.key_memory(1).numbers)
    board.reset_gauges(1)
    assert (board.loads(0).num_requests(), board.loads(0).num_tokens()) == ([0, 0, 1], [0, 0, 30])
    assert SharedTally(board, 0).totals() == {"a": 4}


def test_there_is_room_for_every_counter_of_long_names():
    names = [f"{number}" * 500 for number in range(20)]
    board = Board.create(2, names)
    metrics = Metrics(lambda: None, lambda: None, SharedTally(board, 1))
    for name in names:
        for value in (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.9, 2, 4, 9, 20, 50, 100, 200, 400):
            metrics.request_seconds.observe(name, value=value)
            metrics.first_token_seconds.observe(name, value=value)
        for reason in ("stop", "length", "tool_calls", "abort", "error"):
            metrics.finished.inc(name, reason)
            metrics.empty_answers.inc(name, reason)
        metrics.prompt_tokens.inc(name)
        metrics.completion_tokens.inc(name)
        metrics.undeclared_calls.inc(name)
    for route in range(40):
        for status in range(40):
            metrics.responses.inc(f"/v1/some/route/{route}", str(status))
    assert metrics.text().count(b"_total{") == 20 * 13 + 1600 + 3  # 3: what may run out


def test_a_full_slot_harms_no_other():
    board = Board.create(2, [])
    first, second = SharedTally(board, 0), SharedTally(board, 1)
    second.add("a", 1)
    with pytest.raises(MemoryError):
        first.add("x" * 1_000_000, 1)
    assert second.totals()["a"] == 1


@pytest.mark.parametrize("is_shared", [False, True])
def test_metrics_are_the_same_from_any_tally(is_shared):
    board = Board.create(2, ["m"])
    tallies = [SharedTally(board, 0), SharedTally(board, 1)] if is_shared else [OwnTally()] * 2
    names = [name for name in EngineStats.__struct_fields__ if name.startswith("num_")]
    stats = EngineStats(**dict.fromkeys(names, 3), step_sizes=[2, 1])
    for tally in tallies:
        tally.started_s = 1000.0
        metrics = Metrics(lambda: stats, lambda: None, tally)
        metrics.responses.inc("/x", "200")
        metrics.prompt_tokens.inc("m", by=5)
        for seconds in (0.01, 0.3, 1000):
            metrics.request_seconds.observe("m", value=seconds)
    tallies[0].set_gauge(Gauge.IN_FLIGHT, 4)
    lines = metrics.text().decode().splitlines()
    expected = [
        'moe_serve_http_responses_total{route="/x",status="200"} 2.0',
        'moe_serve_http_responses_created{route="/x",status="200"} 1000.0',
        'moe_serve_prompt_tokens_total{model="m"} 10.0',
        "moe_serve_ignored_keys_total 0.0",
        'moe_serve_request_seconds_bucket{le="0.01",model="m"} 2.0',
        'moe_serve_request_seconds_bucket{le="0.25",model="m"} 2.0',
        'moe_serve_request_seconds_bucket{le="0.5",model="m"} 4.0',
        'moe_serve_request_seconds_bucket{le="1.0",model="m"} 4.0',
        'moe_serve_request_seconds_bucket{le="+Inf",model="m"} 6.0',
        'moe_serve_request_seconds_count{model="m"} 6.0',
        'moe_serve_request_seconds_sum{model="m"} 2000.62',
        "moe_serve_requests_in_flight 4.0",
        "moe_serve_engine_running 3.0",
    ]
    assert [line for line in expected if line not in lines] == []


async def _never():
    await asyncio.sleep(3600)


def test_places_for_large_bodies_are_those_of_the_service():
    """33 wait or are read in all, wherever; one that ends makes room in the other process too."""

    async def main():
        board = Board.create(2, [])
        turn = threading.Lock()
        lanes = [
            Lanes(SharedTally(board, index), turn).of(LARGE_BODY_BYTES + 1).for_client("one") for index in range(2)
        ]
        may_end = threading.Event()
        tasks = [
            asyncio.create_task(lanes[number % 2].run(_never, may_end.wait, 30))
            for number in range(1 + MAX_WAITING_LARGE)
        ]
        while board.sum_gauge(Gauge.LARGE_BODIES) < len(tasks):
            await asyncio.sleep(0.001)
        for lane in lanes:
            with pytest.raises(TooManyRequests):
                await lane.run(_never, may_end.wait, 30)
        may_end.set()
        await asyncio.gather(*tasks)
        assert await lanes[0].run(_never, lambda: 5) == 5
        assert board.sum_gauge(Gauge.LARGE_BODIES) == 0

    asyncio.run(main())


def test_a_client_that_leaves_while_another_process_has_the_turn_costs_nothing():
    done = []

    async def leave_soon():
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def main(turn):
        lane = Lanes(OwnTally(), turn).of(LARGE_BODY_BYTES + 1).for_client("one")
        with pytest.raises(ClientDisconnect):
            await lane.run(leave_soon, lambda: done.append("left"))
        turn.release()
        await lane.run(_never, lambda: done.append("next"))

    turn = threading.Lock()
    turn.acquire()
    asyncio.run(main(turn))
    assert done == ["next"]


def test_a_process_that_dies_gives_its_turn_back():
    board = Board.create(1, [])
    code = f"import fcntl, time; fcntl.lockf({board.descriptor}, fcntl.LOCK_EX, 1); print(); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], pass_fds=[board.descriptor], stdout=subprocess.PIPE) as other:
        other.stdout.read(1)
        with pytest.raises(BlockingIOError):
            fcntl.lockf(board.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        has_turn = threading.Event()

        def work():
            with Turn(board):
                has_turn.set()

        thread = threading.Thread(target=work)
        thread.start()
        assert not has_turn.wait(0.1)
        other.kill()
        wait_until(has_turn.is_set)
        thread.join(10)
    os.close(board.descriptor)
