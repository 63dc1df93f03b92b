"""A service that may open no more files says so, serves the connections it has, and goes on when some are closed."""

import os
import resource
import socket
import time
from functools import partial

import pytest

from engine.version import service_version
from server import open_files
from tests.server.conftest import wait_until
from tests.server.service_process import health, start
from tests.tables import rows

WARNING = "that it may, and each connection takes one; let it open more: ulimit -n"
SOFT, NUM_MORE = 200, 8


def num_open(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def connect(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


@rows("num_workers", 1, 2)
def test_a_service_without_files_to_open_warns_and_goes_on(tmp_path, num_workers):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (SOFT, hard))
    with start(tmp_path, "slow", "--api-workers", str(num_workers), preexec_fn=low) as service, service.http() as http:
        assert health(http) == 200
        pids = service.api_pids or [service.process.pid]
        assert len(pids) == num_workers
        for pid in pids:
            limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            assert limits[0] == min(hard, 1 << 20) > SOFT, "raised at start"
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_open(pid) + NUM_MORE, hard))
        connections = [connect(service.url) for _ in range(num_workers * NUM_MORE)]

        def warns_of_one_more():  # files that were open when they were counted may have been closed since
            connections.append(connect(service.url))
            time.sleep(0.1)  # a process looks so often
            return WARNING in service.err

        wait_until(warns_of_one_more)
        assert health(http) == 200, "over the connection there was"
        for each in connections:
            each.close()
        wait_until(lambda: all(num_open(pid) < resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] for pid in pids))
        with service.http() as another:
            assert health(another) == 200
        assert (service.api_pids or [service.process.pid]) == pids, "no process had to be replaced"


def test_the_version_in_every_answer_is_read_once(monkeypatch):
    """It was read from a file each time: an answer failed with a 500 while no file could be opened."""
    known = service_version()
    monkeypatch.setattr("engine.version.version", lambda _name: pytest.fail("read again"))
    assert service_version() == known


def test_warnings_come_at_most_every_ten_seconds(monkeypatch, caplog):
    now_s = 0.0

    def refuse(*_args):
        raise OSError(24, "Too many open files")

    warning = open_files.FullWarning(lambda: now_s)
    warning.check()
    assert not caplog.records
    monkeypatch.setattr(open_files.os, "open", refuse)
    for now_s in (1.0, 1.1, 10.9, 11.0, 12.0):  # noqa: B007
        warning.check()
    assert [WARNING in record.getMessage() for record in caplog.records] == [True, True]
