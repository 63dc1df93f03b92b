"""Copies between host and device: what is sent, and what the host reads, in whatever order a device's streams run."""

import random

import numpy as np
import pytest
import torch

from engine.transfer import HostBuffers, HostResults, Mark
from tests.engine.fake_streams import FakeStreams, FakeTensor
from tests.tables import rows

CPU = torch.device("cpu")


@pytest.fixture
def streams(monkeypatch):
    return FakeStreams(monkeypatch, random.Random(1).choice)


def numbers_on(streams, size=6):
    return FakeTensor(streams, torch.zeros(size, dtype=torch.int64))


def send_changed(host, numbers):
    host.take()[: len(numbers)] = numbers
    host.send_changed(len(numbers))


def test_numbers_are_sent_again_only_if_they_or_their_count_have_changed(streams):
    target = numbers_on(streams)
    host = HostBuffers(target)
    for numbers, is_sent in (
        ([0, 0], True), ([0, 0], False), ([0, 0], False), ([0, 1], True), ([0, 0], True), ([0, 0, 5], True),
        ([0, 0], True), ([0, 0], False), ([0, 0, 5], True), ([0, 0, 5], False),
    ):  # fmt: skip
        target.copies.clear()
        send_changed(host, numbers)
        assert target.copies == [len(numbers)] * is_sent, numbers


def test_numbers_are_sent_again_after_others_or_after_a_copy_that_failed(streams, monkeypatch):
    target = numbers_on(streams)
    host = HostBuffers(target)
    send_changed(host, [3, 4])
    host.take()[:1] = 9
    host.send(1)
    send_changed(host, [3, 4])
    assert target.copies == [2, 1, 2]
    with monkeypatch.context() as patch:
        patch.setattr(FakeTensor, "copy_", None)
        with pytest.raises(TypeError):
            send_changed(host, [5, 6])
    send_changed(host, [3, 4])
    assert target.copies == [2, 1, 2, 2]
    streams.run_until(lambda: not streams.compute.work)
    assert target.tolist()[:2] == [3, 4]


def test_numbers_that_are_equal_and_not_the_same_are_sent(streams):
    target = FakeTensor(streams, torch.zeros(1, dtype=torch.float64))
    host = HostBuffers(target)
    for number in (0.0, -0.0, np.nan, np.nan):
        send_changed(host, [number])
    assert target.copies == [1, 1, 1]


@rows("on_gpu", False, True)
@rows("seed", *range(12))
def test_the_target_holds_what_was_sent_last_whatever_came_before(monkeypatch, on_gpu, seed):
    """What was launched after a send must find its numbers; buffers are filled anew while older copies still run."""
    rng = random.Random(seed)
    streams = FakeStreams(monkeypatch, rng.choice) if on_gpu else None
    target = numbers_on(streams) if on_gpu else torch.zeros(6, dtype=torch.int64)
    host, want, seen = HostBuffers(target), [], []
    for _ in range(200):
        numbers = [rng.randrange(2) for _ in range(rng.choice((1, 2, 2, 2, 6)))]
        array = host.take()
        array[:] = -1  # what is left of earlier steps must not matter
        array[: len(numbers)] = numbers
        (host.send if rng.random() < 0.1 else host.send_changed)(len(numbers))
        want.append(numbers)

        def look(numbers=numbers):
            seen.append(target[: len(numbers)].tolist())

        if on_gpu:
            streams.compute.launch(look)
            for _ in range(rng.randrange(6)):
                streams.run_one()
        else:
            look()
    if on_gpu:
        streams.run_until(lambda: not streams.compute.work)
    assert seen == want


@rows("seed", *range(20))
def test_the_host_reads_what_each_step_left(monkeypatch, seed):
    """Steps write to the source while copies of earlier ones may not have begun; up to three results are unread."""
    streams = FakeStreams(monkeypatch, random.Random(seed).choice)
    source, rng = numbers_on(streams), random.Random(-seed)
    results, unread, done = HostResults(source), [], []
    num_events = streams.num_events
    for step in range(60):
        results.before_overwrite()
        streams.compute.launch(lambda step=step: (source.values.fill_(step), done.append(step)))
        num = rng.randrange(1, 7)
        unread.append((step, num, *results.fetch(num)))
        while len(unread) > rng.randrange(4):
            number, num, host, mark = unread.pop(0)
            mark.wait()
            assert mark.is_passed
            assert number in done
            assert host.tolist() == [number] * num
    assert streams.num_events == num_events, "nothing is allocated in a step"


def starving(streams, starved):
    """Lets the other streams run as long as any of them can go on."""
    return lambda ready: next((stream for stream in ready if stream is not starved), starved)


def test_what_follows_does_not_wait_for_a_copy_until_it_would_overwrite_its_source(monkeypatch):
    streams = FakeStreams(monkeypatch, lambda ready: ready[0])
    source, log = numbers_on(streams), []
    results = HostResults(source)
    streams._pick = starving(streams, results._stream)
    streams.compute.launch(lambda: source.values.fill_(1))
    host, mark = results.fetch(2)
    streams.compute.launch(lambda: log.append("forward pass"))
    streams.run_until(lambda: not streams.compute.work)
    assert (log, host.tolist(), mark.is_passed) == (["forward pass"], [0, 0], False)
    results.before_overwrite()
    streams.compute.launch(lambda: source.values.fill_(2))
    streams.run_until(lambda: not streams.compute.work)
    assert (host.tolist(), mark.is_passed) == ([1, 1], True)


def test_a_copy_waits_for_the_pass_and_the_host_for_the_copy(streams):
    source = numbers_on(streams)
    results = HostResults(source)
    streams._pick = starving(streams, streams.compute)
    done = []
    streams.compute.launch(lambda: (source.values.fill_(7), done.append("pass")))
    host, mark = results.fetch(3)
    assert not mark.is_passed
    mark.wait()
    assert (done, host.tolist()) == (["pass"], [7, 7, 7])


def test_an_error_of_the_device_is_raised_where_the_host_waits(streams):
    results = HostResults(numbers_on(streams))
    _, mark = results.fetch(1)
    mark._event.error = torch.AcceleratorError("an illegal memory access")
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        mark.wait()


def test_a_mark_that_is_renewed_stands_for_all_that_was_launched_before(streams):
    mark, log = Mark(torch.device("cuda")), []
    mark.wait()
    streams.compute.launch(lambda: log.append("more"))
    assert mark.is_passed
    mark.renew()
    assert not mark.is_passed
    mark.wait()
    assert log == ["more"]


def test_on_a_cpu_results_are_there_at_once():
    source = torch.arange(4)
    results = HostResults(source)
    results.before_overwrite()
    host, mark = results.fetch(2)
    source.fill_(9)
    mark.wait()
    assert mark.is_passed
    assert host.tolist() == [0, 1]
    mark.renew()
    assert Mark(CPU).is_passed


@pytest.mark.gpu
def test_steps_on_a_gpu_get_the_numbers_that_were_sent_and_the_host_those_that_they_leave():
    """Each step doubles what it got, behind work that takes longer than the launches."""
    given, left = (torch.zeros(64, dtype=torch.int64, device="cuda") for _ in "ab")
    slow = torch.rand(2048, 2048, device="cuda")
    host, results, unread = HostBuffers(given), HostResults(left), []
    for step in range(100):
        numbers = np.arange(64) + step // 3
        send_changed(host, numbers)
        slow @ slow
        results.before_overwrite()
        torch.mul(given, 2, out=left)
        unread.append((numbers * 2, *results.fetch(64)))
        while len(unread) > step % 4:
            want, got, mark = unread.pop(0)
            mark.wait()
            assert got.tolist() == want.tolist()
