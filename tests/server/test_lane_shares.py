"""Large bodies: clients share the places in the queue, so one of them cannot keep the others out."""

import asyncio
import json
import threading

import pytest

from server.errors import TooManyRequests
from server.lanes import LARGE_BODY_BYTES, MAX_WAITING_LARGE, Lane
from tests.server.conftest import wait_until


async def stay(_receive=None):
    """The `receive` of a client that does not leave."""
    await asyncio.Event().wait()


class Queue:
    """A lane of one thread and three waiting places; `release` lets the work end."""

    def __init__(self):
        self.lane = Lane("test", num_threads=1, max_waiting=3)
        self.release, self.done = threading.Event(), []

    def add(self, client, name):
        def work():
            self.release.wait(20)
            self.done.append(name)

        return asyncio.create_task(self.lane.for_client(client).run(stay, work))

    async def settle(self):
        for _ in range(5):
            await asyncio.sleep(0.01)


def run(scenario):
    asyncio.run(scenario(Queue()))


def test_a_newcomer_takes_the_youngest_waiting_place_of_whoever_has_most():
    async def scenario(queue):
        hog = [queue.add("hog", f"hog {i}") for i in range(4)]
        await queue.settle()
        newcomer = queue.add("other", "other 0")
        await queue.settle()
        assert [task.done() for task in hog] == [False, False, False, True]
        with pytest.raises(TooManyRequests):
            await hog[3]
        queue.release.set()
        await asyncio.gather(*hog[:3], newcomer)
        assert queue.done == ["hog 0", "hog 1", "hog 2", "other 0"]

    run(scenario)


def test_a_client_at_its_share_is_refused_and_takes_nothing():
    async def scenario(queue):
        tasks = [queue.add("hog", "hog") for _ in range(4)]
        await queue.settle()
        tasks += [queue.add("other", "other") for _ in range(2)]
        await queue.settle()
        for client in ("hog", "other"):  # two of four places each
            with pytest.raises(TooManyRequests):
                await queue.add(client, "refused")
        queue.release.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(result, TooManyRequests) for result in results] == [False] * 2 + [True] * 2 + [False] * 2
        assert queue.done == ["hog", "hog", "other", "other"]

    run(scenario)


def test_one_client_alone_may_use_every_place():
    async def scenario(queue):
        tasks = [queue.add("only", i) for i in range(4)]
        queue.release.set()
        await asyncio.gather(*tasks)
        assert queue.done == [0, 1, 2, 3]

    run(scenario)


def test_a_lane_without_a_bound_refuses_nobody():
    async def scenario(_queue):
        lane = Lane("test", num_threads=1)
        assert await asyncio.gather(*(lane.for_client("a").run(stay, str, i) for i in range(50))) == [
            str(i) for i in range(50)
        ]

    run(scenario)


def test_the_service_tells_clients_apart(service, monkeypatch):
    """Bodies of one key fill the lane; a body of another key is read all the same."""
    begun, release = threading.Event(), threading.Event()

    def slow(_wire, _info):
        begun.set()
        release.wait(20)
        return [1]

    monkeypatch.setattr(service.app.state.context.converter, "tokenize", slow)
    body = json.dumps({"prompt": "x" * (LARGE_BODY_BYTES + 1)})
    statuses = {"hog": [], "other": []}

    def post(key):
        with service.http() as http:
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            statuses[key].append(http.post("/tokenize", content=body, headers=headers).status_code)

    lane = service.app.state.context.lanes.of(len(body))
    threads = [threading.Thread(target=post, args=("hog",)) for _ in range(MAX_WAITING_LARGE + 1)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: begun.is_set() and len(lane._calls) == MAX_WAITING_LARGE + 1)
        threads.append(threading.Thread(target=post, args=("other",)))
        threads[-1].start()
        wait_until(lambda: statuses["hog"] == [429])
    finally:
        release.set()
        for thread in threads:
            thread.join(30)
    assert statuses["other"] == [200]
    assert sorted(statuses["hog"]) == [200] * MAX_WAITING_LARGE + [429]
