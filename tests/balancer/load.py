"""Clients that ask one address without pause, each in a session of its own, and note how every request ended."""

import json
import threading
from collections import Counter
from dataclasses import dataclass, field

import httpx2

WHOLE, DONE, EVENT, CUT, LOST = "whole answer", "stream to its end", "stream with an error event", "stream cut", "lost"
"""How a request can end. LOST: no answer came, although no byte of one had been sent."""


@dataclass
class Load:
    """`with Load(url, 8) as load:` runs until the block ends; `ends` then counts how requests ended, `why` tells."""

    url: str
    num_clients: int
    max_tokens: int = 60
    ends: Counter[str] = field(default_factory=Counter)
    why: list[str] = field(default_factory=list)
    replicas: dict[str, set[str]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> "Load":
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(self.num_clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    @property
    def num_ended(self) -> int:
        return sum(self.ends.values())

    def _run(self, number: int) -> None:
        """Every second client streams."""
        with httpx2.Client(base_url=self.url, timeout=60, verify=False, headers={"x-session-id": f"{number}"}) as http:
            while not self._stop.is_set():
                end, why = self._ask(http, streams=number % 2 == 0)
                self.ends[end] += 1
                if why:
                    self.why.append(f"{end}: {why}")

    def _ask(self, http: httpx2.Client, *, streams: bool) -> tuple[str, str]:
        body = {
            "prompt": "The capital of France", "max_tokens": self.max_tokens, "ignore_eos": True, "stream": streams,
        }  # fmt: skip
        text, has_begun = "", False
        try:
            with http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    return LOST, f"{answer.status_code} {answer.read()[:200]!r}"
                has_begun = streams
                for part in answer.iter_text():
                    text += part
        except httpx2.HTTPError as error:
            return (CUT if has_begun else LOST), repr(error)
        if not streams:
            return WHOLE, ""
        if text.endswith("data: [DONE]\n\n"):
            return DONE, ""
        last = text.strip().rpartition("data: ")[2]
        return (EVENT, last[:200]) if "error" in json.loads(last) else (CUT, last[:200])
