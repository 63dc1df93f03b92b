"""A GPU's streams without a GPU: what is launched runs later, one piece at a time, in any order that events allow."""

from collections import deque
from contextlib import contextmanager

import torch


class FakeStreams:
    """Stands for `torch.cuda`. `pick` chooses which of the streams that can go on does so."""

    def __init__(self, monkeypatch, pick):
        self._pick, self._streams, self.num_events = pick, [], 0
        self.compute = self.current = FakeStream(self)
        monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(self))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(self))
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(
            "engine.transfer._on_host", lambda tensor: FakeTensor(self, torch.zeros_like(tensor.values))
        )

    @contextmanager
    def _on(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def run_one(self):
        """One piece of work; False if no stream can go on."""
        ready = [stream for stream in self._streams if stream.can_go_on]
        if ready:
            self._pick(ready).work.popleft()[1]()
        return bool(ready)

    def run_until(self, is_done):
        while not is_done():
            assert self.run_one(), "the host waits for something that never comes"


class FakeStream:
    def __init__(self, streams):
        self.work = deque()  # (whether it can begin, what it does)
        streams._streams.append(self)

    @property
    def can_go_on(self):
        return bool(self.work) and self.work[0][0]()

    def launch(self, action):
        self.work.append((lambda: True, action))

    def wait_event(self, event):
        number = event.num_recorded
        self.work.append((lambda: event.num_passed >= number, lambda: None))


class FakeEvent:
    def __init__(self, streams):
        self._streams, self.num_recorded, self.num_passed = streams, 0, 0
        self.error = None
        streams.num_events += 1

    def record(self, stream=None):
        self.num_recorded += 1
        number = self.num_recorded
        (stream or self._streams.current).launch(lambda: setattr(self, "num_passed", number))

    def query(self):
        return self.num_passed == self.num_recorded

    def synchronize(self):
        self._streams.run_until(self.query)
        if self.error is not None:
            raise self.error


class FakeTensor:
    """Copies to it are launched on the current stream, and read their source when they run."""

    is_cuda, device = True, torch.device("cuda")

    def __init__(self, streams, values):
        self.streams, self.values, self.copies = streams, values, []

    def __getitem__(self, index):
        part = FakeTensor(self.streams, self.values[index])
        part.copies = self.copies
        return part

    def copy_(self, source, non_blocking=False):
        assert non_blocking
        self.copies.append(len(source.values))
        self.streams.current.launch(lambda: self.values.copy_(source.values))
        return self

    def numpy(self):
        return self.values.numpy()

    def tolist(self):
        return self.values.tolist()
