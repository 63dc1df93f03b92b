"""Ranks of several hosts that meet, as threads: who is missing, who comes twice, who differs, who has died."""

import dataclasses
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from engine import rank_meeting
from engine.config import EngineConfig
from engine.errors import EngineConfigError, MachineError
from engine.messages import RankSetup
from engine.rank_meeting import RankMeeting
from loaders.phases import Phase, StartPhases
from tests.server.conftest import wait_until


class Hosts:
    """Ranks of an engine whose hosts have one each."""

    def __init__(self, num_hosts):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._config = EngineConfig(
            model=Path("m"), tensor_parallel_size=num_hosts, nnodes=num_hosts, master_addr="127.0.0.1",
            master_port=self._port,
        )  # fmt: skip
        self._pool = ThreadPoolExecutor(8)
        self.meetings = []

    def join(self, rank, phases=None, **changes):
        """The future of a rank that meets the others."""
        config = dataclasses.replace(self._config, node_rank=rank, **changes)
        place = RankSetup(
            rank=rank, store_host="127.0.0.1", store_port=self._port, outputs_address=f"outputs of {rank}"
        )

        def meet():
            meeting = RankMeeting(config, place)
            self.meetings.append(meeting)
            invitation = meeting.invitation()
            meeting.meet(invitation, phases)
            return invitation

        return self._pool.submit(meet)

    def meeting_of(self, rank, number=0):
        """Of the process that claimed this number; `number` counts those who have."""
        found = []

        def has_claimed():
            found[:] = [each for each in self.meetings if each._rank == rank and each._listener is not None]
            return len(found) > number and self._holder(rank) == found[number]._listener.getsockname()

        wait_until(has_claimed)
        return found[number]

    def _holder(self, rank):
        for store in [each.store for each in self.meetings if each._rank == 0]:
            if store.check([f"rank/{rank}"]):
                return msgspec.json.decode(store.get(f"rank/{rank}"), type=tuple)
        return None

    def close(self):
        """All ranks leave."""
        self._pool.shutdown()
        for meeting in self.meetings:
            meeting.close()


@pytest.fixture
def hosts(request, monkeypatch):
    monkeypatch.setattr(rank_meeting, "MEET_S", 10.0)
    hosts = Hosts(getattr(request, "param", 2))
    yield hosts
    hosts.close()


three = pytest.mark.parametrize("hosts", [3], indirect=True)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ranks_meet_in_any_order(hosts, order):
    futures = []
    for rank in order:
        futures.append(hosts.join(rank))
        time.sleep(0.3)
    assert {future.result(10).outputs_address for future in futures} == {"outputs of 0"}


def test_a_host_that_does_not_come_is_named(hosts, monkeypatch, caplog):
    monkeypatch.setattr(rank_meeting, "MEET_S", 1.0)
    monkeypatch.setattr(rank_meeting, "_SAY_S", 0.3)
    caplog.set_level("INFO")
    phases = StartPhases()
    with phases.phase(Phase.MEETING, 2):
        future = hosts.join(0, phases)
        with pytest.raises(MachineError, match=r"minutes for host 1 \(rank 1\): start all hosts"):
            future.result(10)
        progress = phases.progress()
    assert (progress.phase, progress.done, progress.total) == ("meeting ranks", 1, 2)
    assert progress.waits_for == "host 1 (rank 1)"
    assert re.search(r"waiting for host 1 \(rank 1\), \d s so far", caplog.text)


def test_host_0_that_does_not_come_is_named(hosts, monkeypatch, caplog):
    monkeypatch.setattr(rank_meeting, "MEET_S", 1.0)
    monkeypatch.setattr(rank_meeting, "_SAY_S", 0.3)
    caplog.set_level("INFO")
    with pytest.raises(MachineError, match=r"minutes for host 0 at 127.0.0.1, port \d+ \(Connection refused\): start"):
        hosts.join(1).result(10)
    assert "waiting for host 0 at 127.0.0.1" in caplog.text


@three
def test_every_host_hears_what_differs(hosts):
    futures = [hosts.join(0), hosts.join(2)]
    hosts.meeting_of(2)
    futures.append(hosts.join(1, page_size=32))
    for future in futures:
        with pytest.raises(EngineConfigError, match="page_size is 32 on host 1 and 16 on host 0"):
            future.result(10)


def test_hosts_of_other_sizes_do_not_hang(hosts):
    futures = [hosts.join(0), hosts.join(3, tensor_parallel_size=4, nnodes=4)]
    for future in futures:
        with pytest.raises(EngineConfigError, match="tensor_parallel_size is 4 on host 3 and 2 on host 0"):
            future.result(10)


@pytest.mark.parametrize(
    ("hosts", "reason"),
    [(2, "have met already, and another process is rank 1"), (3, "at 127.0.0.1, is rank 1 already")],
    indirect=["hosts"],
)
def test_a_number_that_is_taken_is_refused(hosts, reason):
    """Before and after the others have met, and without harm to them."""
    futures = [hosts.join(0), hosts.join(1)]
    hosts.meeting_of(1)
    wait_until(lambda: futures[0].done() == futures[1].done() == ("have met" in reason))
    with pytest.raises(MachineError, match=f"{reason}: is node_rank 1 right"):
        hosts.join(1).result(10)
    if "have met" not in reason:
        futures.append(hosts.join(2))
    assert {future.result(10).outputs_address for future in futures} == {"outputs of 0"}


@three
def test_who_has_died_is_in_nobodys_way(hosts, caplog):
    futures = [hosts.join(0), hosts.join(1)]
    die(hosts.meeting_of(1))
    futures += [hosts.join(1)]
    die(hosts.meeting_of(1, 1))
    futures += [hosts.join(2)]
    wait_until(lambda: "host 1 (rank 1) was there, and cannot be reached any more" in caplog.text)
    assert not futures[0].done()
    futures += [hosts.join(1)]
    assert {futures[i].result(10).outputs_address for i in (0, 3, 4)} == {"outputs of 0"}


def test_who_is_taken_for_dead_claims_its_number_anew(hosts, monkeypatch):
    answers = iter([False, True])
    monkeypatch.setattr(rank_meeting, "_answers", lambda _holder: next(answers))
    futures = [hosts.join(0), hosts.join(1)]
    assert {future.result(10).outputs_address for future in futures} == {"outputs of 0"}


def test_a_number_that_rank_0_frees_meanwhile_is_claimed(hosts, monkeypatch):
    """The store answers a comparison with a key that is gone with what it was asked for, so the rank asked for ever."""
    first = hosts.join(0)
    store = hosts.meeting_of(0).store
    store.set("rank/1", "of a dead process")

    def is_freed_while_asked(holder):
        if holder == "of a dead process":
            store.delete_key("rank/1")
        return holder != "of a dead process"

    monkeypatch.setattr(rank_meeting, "_answers", is_freed_while_asked)
    assert hosts.join(1).result(10) == first.result(10)


def die(meeting):
    """What a process that ends does."""
    del meeting.store
    meeting.close()
