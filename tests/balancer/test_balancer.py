"""Two replicas of the real service behind HAProxy with `deploy/haproxy.cfg`, under load: what their end costs clients.

`make balancer` runs it; it needs HAProxy (Debian's package `haproxy`). With `ARGS=--record` it writes
`benchmarks/results/balancer.json`.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from tests.balancer.conftest import Note
from tests.balancer.load import CUT, DONE, EVENT, LOST, WHOLE, Load
from tests.server.conftest import wait_until
from tests.server.service_process import ServiceProcess, free_port, has_ended, health, start_bundled

pytestmark = [pytest.mark.balancer, pytest.mark.timeout(600)]
CONFIG = Path(__file__).parents[2] / "deploy" / "haproxy.cfg"
NUM_CLIENTS = 8
# `.../RETRIES QUEUES "POST`; + stands for a retry on another replica
RETRIED = re.compile(r"/\+?[1-9]\d* \d+/\d+ \"POST")


class Replicas:
    """Two services on ports of their own, and the balancer in front of them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.ports = [free_port(), free_port()]
        self.services: list[ServiceProcess] = [self.start(0), self.start(1)]
        for service in self.services:
            assert service.url
        self.url = f"http://127.0.0.1:{free_port()}"
        self._log = folder / "haproxy.log"
        names = {"LISTEN": self.url.removeprefix("http://")}
        names |= {f"REPLICA_{i + 1}": f"127.0.0.1:{port}" for i, port in enumerate(self.ports)}
        log = stack.enter_context(self._log.open("w"))
        self.balancer = subprocess.Popen(["haproxy", "-db", "-f", CONFIG], env=os.environ | names, stdout=log)
        stack.callback(self.balancer.wait)
        stack.callback(self.balancer.terminate)
        with httpx2.Client(base_url=self.url, verify=False) as http:
            wait_until(lambda: health(http) == 200, 20)

    def start(self, index: int, *argv: str) -> ServiceProcess:
        """A replica, not yet ready."""
        folder = self._folder / f"{index}-{time.monotonic_ns()}"
        folder.mkdir()
        flags = ("--port", str(self.ports[index]), "--max-num-seqs", "16", "--exit-on-engine-death")
        return self._stack.enter_context(start_bundled(folder, *flags, "--client-header", "X-Forwarded-For", *argv))

    def restart(self, index: int, *argv: str) -> None:
        """Another service in the place of one that has ended, ready."""
        self.services[index] = self.start(index, *argv)
        assert self.services[index].url

    def num_tokens(self, index: int, kind: str = "generated") -> int:
        """Tokens of a kind that the engine of a replica has counted."""
        with self.services[index].http() as http:
            stats = http.get("/health/ready").json()["stats"]  # None until the engine has published some
            return 0 if stats is None else stats[f"num_{kind}_tokens"]

    def num_retried(self) -> int:
        """Requests that the balancer has sent again so far."""
        return len(RETRIED.findall(self._log.read_text()))

    def wait_for_traffic(self, index: int) -> None:
        """Return when the balancer has sent a replica something."""
        before = self.num_tokens(index)
        wait_until(lambda: self.num_tokens(index) > before + 50, 60)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with ExitStack() as stack:
        yield Replicas(tmp_path_factory.mktemp("replicas"), stack)


def drain(replicas: Replicas) -> None:
    """A replica ends in order and comes back."""
    replicas.services[0].signal(signal.SIGTERM)
    assert replicas.services[0].process.wait(60) == 0
    replicas.restart(0)


def roll_both(replicas: Replicas) -> None:
    """One after the other, as a rollout does."""
    for index in (0, 1):
        replicas.services[index].signal(signal.SIGTERM)
        assert replicas.services[index].process.wait(60) == 0
        replicas.restart(index)
        replicas.wait_for_traffic(index)


def kill_engine(replicas: Replicas) -> None:
    """The engine dies; the HTTP process tells its clients, and the service ends."""
    os.kill(replicas.services[0].engine_pid, signal.SIGKILL)
    assert replicas.services[0].process.wait(60) == 1
    replicas.restart(0)


def kill_all(replicas: Replicas) -> None:
    """The whole replica is gone without a word."""
    service = replicas.services[1]
    engine = service.engine_pid
    service.process.kill()
    service.process.wait(60)
    wait_until(lambda: has_ended(engine))
    replicas.restart(1)


@pytest.mark.parametrize(
    ("fault", "broken"),
    [(drain, set()), (roll_both, set()), (kill_engine, {EVENT}), (kill_all, {CUT})],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_no_request_is_lost_that_had_not_begun_to_stream(
    replicas: Replicas, note: Note, fault: Callable[[Replicas], None], broken: set[str]
) -> None:
    """`broken`: how streams that had begun on the replica may end."""
    retried = replicas.num_retried()
    with Load(replicas.url, NUM_CLIENTS) as load:
        for index in (0, 1):
            replicas.wait_for_traffic(index)
        fault(replicas)
        ended = load.num_ended
        wait_until(lambda: load.num_ended > ended + 2 * NUM_CLIENTS, 60)
    note(fault.__name__, load, replicas.num_retried() - retried)
    assert load.ends[LOST] == 0, load.why
    assert set(load.ends) <= {WHOLE, DONE} | broken, load.why
    assert load.ends[EVENT] + load.ends[CUT] <= NUM_CLIENTS, load.why
    assert load.ends[WHOLE] > NUM_CLIENTS
    assert load.ends[DONE] > NUM_CLIENTS


def test_a_drain_that_takes_too_long_ends_streams_with_an_event(replicas: Replicas, note: Note) -> None:
    replicas.services[0].signal(signal.SIGTERM)
    assert replicas.services[0].process.wait(60) == 0
    replicas.restart(0, "--drain-timeout", "0.2")
    retried = replicas.num_retried()
    with Load(replicas.url, NUM_CLIENTS, max_tokens=400) as load:
        replicas.wait_for_traffic(0)
        replicas.services[0].signal(signal.SIGTERM)
        assert replicas.services[0].process.wait(60) == 0
    note("drain, timeout 0.2 s", load, replicas.num_retried() - retried)
    replicas.restart(0)
    assert load.ends[LOST] == load.ends[CUT] == 0, load.why
    assert 0 < load.ends[EVENT] <= NUM_CLIENTS, load.why
    assert any('"unavailable"' in each for each in load.why)


def test_a_session_stays_with_its_replica(replicas: Replicas) -> None:
    """While both are there; sessions are spread over both."""
    served = {}
    with httpx2.Client(base_url=replicas.url, verify=False, timeout=60) as http:
        for session in range(12):
            moved = []
            for _ in range(3):
                before = [replicas.num_tokens(index, "prompt") for index in (0, 1)]
                body = {"prompt": "Hello", "max_tokens": 1}
                assert http.post("/v1/completions", json=body, headers={"x-session-id": f"s{session}"}).is_success
                wait_until(lambda before=before: [replicas.num_tokens(index, "prompt") for index in (0, 1)] != before)
                moved.append(replicas.num_tokens(0, "prompt") != before[0])
            assert len(set(moved)) == 1, session
            served[session] = moved[0]
    assert set(served.values()) == {True, False}
