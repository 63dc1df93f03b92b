"""What a process of the plan search may do, well or badly, without a card. The group's model says which."""

import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from typing import Any


@dataclass(frozen=True)
class FakeGroup:
    """Stands for a `Group`, but a process that unpickles it need not import torch."""

    model: str
    format_name: str = "mxfp4"
    tokens: tuple[int, ...] = (1, 4)

    def __str__(self) -> str:
        return f"{self.model} {self.format_name} 1,4"


def work(group: Any, settings: Any, connection: Connection, preparing: Semaphore) -> None:
    """A row says when its turn began and ended."""
    compiled = time.monotonic()
    if group.model == "dies":
        os._exit(3)
    if group.model == "hangs":
        time.sleep(600)
    connection.send("RuntimeError: no memory" if group.model == "fails" else None)
    connection.recv()
    begin = time.monotonic()
    if group.model == "dies late":
        os._exit(4)
    if group.model == "hangs late":
        time.sleep(600)
    time.sleep(0.05)
    row = {"model": group.model, "compiled": compiled, "begin": begin, "end": time.monotonic()}
    connection.send(([row], [{"model": group.model, "reason": "one plan was wrong"}]))
