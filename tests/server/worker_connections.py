"""Connections to one of several HTTP processes of a service, and what `/metrics` says."""

import json
import os
import re
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import ClassVar


class Connection:
    """One connection to a service; `pid` is the HTTP process at its other end."""

    opened: ClassVar = []  # closed at the end of each test

    def __init__(self, service, name="client"):
        self.opened.append(self)
        self.answer = None
        self.http = HTTPConnection(service.url.removeprefix("http://"), timeout=60)
        self.name = name
        assert self.get("/health/live")
        port = self.http.sock.getsockname()[1]
        [inode] = {inode for client_port, inode in sockets_of(service) if client_port == port}
        [self.pid] = {pid for pid in service.api_pids if inode in inodes_of(pid)}

    def get(self, path):
        self.http.request("GET", path)
        return self.http.getresponse().read().decode()

    def send(self, fields):
        headers = {"authorization": self.name, "content-type": "application/json"}
        self.http.request("POST", "/v1/completions", json.dumps(fields), headers)

    def read_status(self):
        """The answer's status, once it begins; the rest is read by `rest`."""
        self.answer = self.http.getresponse()
        return self.answer.status

    def ask(self, fields):
        self.send(fields)
        return self.read_status()

    def rest(self):
        return self.answer.read().decode()

    def close(self):
        self.http.close()
        if self.answer is not None:
            self.answer.close()


def sockets_of(service):
    """Port of the client and inode of the service's end, for all connections to the service."""
    port = int(service.url.rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [(int(row[2].split(":")[1], 16), row[9]) for row in rows if int(row[1].split(":")[1], 16) == port]


def inodes_of(pid):
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(descriptor))
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


@contextmanager
def two_connections(service):
    """One to each process."""
    connections = [Connection(service) for _ in range(2)]
    while connections[0].pid == connections[-1].pid:
        connections.append(Connection(service))
    yield connections[0], connections[-1]
    for connection in connections:
        connection.close()


def metrics(text):
    rows = re.findall(r"^(\w+)(?:\{.*\})? (\S+)$", text, re.MULTILINE)
    sums = {}
    for name, value in rows:
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums
