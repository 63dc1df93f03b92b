"""The acceptor of several HTTP processes: who gets a connection, and what happens while nobody can take one."""

import asyncio
import errno
import os
import socket

import pytest

from server.connections import Acceptor
from server.listener import bind
from tests.tables import rows


class Receiver:
    def __init__(self, num_open=0, takes=True, is_ready=False):
        self.num_open = num_open
        self.takes = takes
        self.is_ready = is_ready
        self.got = []

    def hand_over(self, connection):
        if self.takes:
            self.got.append(connection.getpeername()[1])
            self.num_open += 1
        return self.takes


class Clients:
    """They connect when told to, and know their ports."""

    def __init__(self, listener):
        self.address = listener.getsockname()
        self.sockets = []

    def connect(self, count=1):
        self.sockets += [socket.create_connection(self.address, timeout=5) for _ in range(count)]

    @property
    def ports(self):
        return [each.getsockname()[1] for each in self.sockets]


@pytest.fixture
def run():
    """Runs a test's coroutine with an acceptor on a port, and with clients."""

    def run(work):
        async def main():
            listener = bind("127.0.0.1", 0)
            acceptor, clients = Acceptor(listener), Clients(listener)
            await work(acceptor, clients)
            acceptor.close()
            for each in clients.sockets:
                each.close()
            with pytest.raises(ConnectionRefusedError):
                clients.connect()

        asyncio.run(main())

    return run


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def test_who_has_the_fewest_open_is_next_and_equals_take_turns(run):
    async def work(acceptor, clients):
        receivers = second, *_others = [Receiver(0), Receiver(2), Receiver(2)]
        acceptor.set_receivers(receivers)
        clients.connect(5)
        await until(lambda: sum(len(each.got) for each in receivers) == 5)
        assert second.got[:2] == clients.ports[:2]
        assert [each.num_open for each in receivers] == [3, 3, 3]

    run(work)


def test_connections_wait_for_a_receiver(run):
    async def work(acceptor, clients):
        clients.connect(3)
        acceptor.set_receivers([])
        await asyncio.sleep(0.05)
        receiver = Receiver()
        acceptor.set_receivers([receiver])
        await until(lambda: receiver.got == clients.ports)
        acceptor.set_receivers([])
        clients.connect()
        await asyncio.sleep(0.05)
        assert len(receiver.got) == 3

    run(work)


def test_a_receiver_that_takes_none_is_passed_over_or_waited_for(run):
    async def work(acceptor, clients):
        busy, other = Receiver(takes=False), Receiver(9)
        acceptor.set_receivers([busy, other])
        clients.connect()
        await until(lambda: other.got == clients.ports)
        other.takes = False
        clients.connect(2)
        await asyncio.sleep(0.1)
        assert len(other.got) == 1
        busy.takes = True
        await until(lambda: busy.got == clients.ports[1:])

    run(work)


def test_who_knows_that_the_engine_is_ready_goes_first(run):
    """While none knows, all get connections: they can say that the model is loading."""

    async def work(acceptor, clients):
        receivers = first, second = [Receiver(), Receiver()]
        acceptor.set_receivers(receivers)
        clients.connect(2)
        await until(lambda: [len(each.got) for each in receivers] == [1, 1])
        second.is_ready = True
        clients.connect(3)
        await until(lambda: second.got == clients.ports[1:])
        first.is_ready = True
        clients.connect(3)
        await until(lambda: first.got == [clients.ports[0], *clients.ports[-3:]])

    run(work)


@rows(
    "number, words",
    (errno.EMFILE, "this process has opened all"),
    (errno.ENFILE, "no connections can be accepted now: Too many open files in system"),
)
def test_no_descriptors_are_left_for_a_while(run, monkeypatch, caplog, number, words):
    monkeypatch.setattr("server.connections._ERROR_RETRY_S", 0.05)

    class Full:
        """A listening socket whose first `accept` fails."""

        def __init__(self, listener):
            self.listener, self.num_failures = listener, 0

        def fileno(self):
            return self.listener.fileno()

        def close(self):
            self.listener.close()

        def accept(self):
            if not self.num_failures:
                self.num_failures += 1
                raise OSError(number, os.strerror(number))
            return self.listener.accept()

    async def work(acceptor, clients):
        acceptor._listener = Full(acceptor._listener)
        receiver = Receiver()
        acceptor.set_receivers([receiver])
        clients.connect()
        await until(lambda: receiver.got == clients.ports)

    run(work)
    [record] = caplog.records
    assert words in record.getMessage()
