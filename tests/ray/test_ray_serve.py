"""Two replicas of the real service under Ray Serve: sessions stay, streams pass through, and what a death costs.

`make ray` runs it, with Ray in an environment of its own.
"""

import json
import os
import signal
import time
from collections.abc import Callable

import httpx2
import pytest

from tests.balancer.load import CUT, LOST, Load
from tests.ray.conftest import Cluster
from tests.server.conftest import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
NUM_CLIENTS = 8
PROMPT = "The capital of France"


def client(cluster: Cluster) -> httpx2.Client:
    return httpx2.Client(base_url=cluster.url, timeout=60, verify=False)


def test_a_session_finds_what_its_replica_has_cached(cluster: Cluster) -> None:
    """The second request of a session reads its prompt from the prefix cache, whichever replica that is."""
    prompt = " ".join(f"{number} is a number." for number in range(60))
    with client(cluster) as http:
        for session in range(6):
            usage = []
            for _ in range(3):
                body = {"prompt": f"{session}. {prompt}", "max_tokens": 1}
                answer = http.post("/v1/completions", json=body, headers={"x-session-id": f"s{session}"})
                assert answer.status_code == 200, answer.text
                usage.append(answer.json()["usage"])
            cached = [each["prompt_tokens_details"]["cached_tokens"] for each in usage]
            assert cached[0] == 0 < min(cached[1:]), session


def test_tokens_of_a_stream_come_one_by_one(cluster: Cluster) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": True}
    with client(cluster) as http, http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        times = [time.monotonic() for part in answer.iter_text() if part]
    assert len(times) > 20
    assert times[-1] - times[0] > 0.02


def test_errors_and_keys_pass_through(cluster: Cluster) -> None:
    with client(cluster) as http:
        answer = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": -1})
        assert answer.status_code == 400
        assert "max_tokens" in answer.json()["error"]["message"]
        assert http.get("/v1/models").json()["data"]


def kill_service(cluster: Cluster) -> None:
    """The service of one replica dies, and its actor ends a second later."""
    os.kill(cluster.services[0], signal.SIGKILL)


def kill_actor(cluster: Cluster) -> None:
    """One replica of Ray dies; the service drains and ends."""
    os.kill(cluster.actors[0], signal.SIGKILL)


def wait_until_replaced(cluster: Cluster, before: set[int], num_new: int) -> None:
    """Return when so many services are new, and there are two."""
    wait_until(lambda: len(cluster.services) == 2 and len(set(cluster.services) - before) == num_new, 120)


@pytest.mark.parametrize("fault", [kill_service, kill_actor], ids=lambda each: each.__name__)
def test_a_replica_that_dies_is_replaced(cluster: Cluster, fault: Callable[[Cluster], None]) -> None:
    """Requests on it fail, and those of the next second; all others are answered, by the other replica."""
    before = set(cluster.services)
    with Load(cluster.url, NUM_CLIENTS) as load:
        wait_until(lambda: load.num_ended > 2 * NUM_CLIENTS, 60)
        fault(cluster)
        time.sleep(10)
        lost = load.ends[LOST]
        wait_until_replaced(cluster, before, 1)
        ended = load.num_ended
        wait_until(lambda: load.num_ended > ended + 4 * NUM_CLIENTS, 60)
    print(json.dumps({"fault": fault.__name__, **load.ends}), load.why[-1:])
    assert load.ends[LOST] == lost, "a request was lost while the other replica served"
    assert load.ends[CUT] <= NUM_CLIENTS
    if fault is kill_actor:
        assert lost <= NUM_CLIENTS
    else:
        assert load.ends[CUT] == 0, load.why
        by_ray = [why for why in load.why if why.startswith(LOST) and "unavailable" not in why]
        assert len(by_ray) <= NUM_CLIENTS, load.why  # those that the replica had when it ended: a 500 from Ray


def test_a_stream_whose_service_dies_ends_with_an_error_event(cluster: Cluster) -> None:
    before = set(cluster.services)
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    text = ""
    with client(cluster) as http, http.stream("POST", "/v1/completions", json=body) as answer:
        for part in answer.iter_text():
            if not text:
                for pid in before:
                    os.kill(pid, signal.SIGKILL)
            text += part
    last = json.loads(text.strip().rpartition("data: ")[2])
    assert last["error"]["code"] == "unavailable"
    wait_until_replaced(cluster, before, 2)
