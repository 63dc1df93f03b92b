"""Unruly clients: each does one thing after another, chosen by its own generator, until the time is over."""

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx2

from tests.soak.bodies import LEAVERS_MODEL, Post, large, malformed, question

_ANSWER_TIMEOUT_S = 180  # an answer that takes longer counts as lost


@dataclass
class Report:
    """What the clients saw. The sums are of complete answers, of clients that did not leave."""

    actions: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_choices: int = 0

    def add_usage(self, usage: dict[str, int], num_choices: int) -> None:
        """Count a complete answer."""
        self.num_prompt_tokens += usage["prompt_tokens"]
        self.num_completion_tokens += usage["completion_tokens"]
        self.num_choices += num_choices


class Client:
    """One client with a connection pool of its own."""

    def __init__(self, url: str, rng: random.Random, report: Report, large_posts: list[Post]) -> None:
        self._rng = rng
        self._report = report
        self._large = large_posts
        self._http = httpx2.AsyncClient(base_url=url, timeout=_ANSWER_TIMEOUT_S, verify=False)

    async def run(self, until_s: float) -> None:
        """Act until the time is over; an error of the client itself is told in the report."""
        actions = [self._whole, self._stream, self._several, self._slow, self._leave_stream, self._leave_early]
        actions += [self._malformed, self._large_body, self._large_and_leave]
        async with self._http:
            while time.monotonic() < until_s:
                action = self._rng.choice(actions)
                self._report.actions[action.__name__.strip("_")] += 1
                try:
                    await action()
                except Exception as error:
                    self._report.wrong.append(f"{action.__name__}: {error!r}")

    async def _whole(self) -> None:
        await self._ask(question(self._rng))

    async def _several(self) -> None:
        await self._ask(question(self._rng, n=self._rng.randint(2, 6), max_tokens=20))

    async def _malformed(self) -> None:
        await self._ask(malformed(self._rng))

    async def _large_body(self) -> None:
        await self._ask(self._rng.choice(self._large))

    async def _stream(self) -> None:
        await self._read_stream(pause_s=0.0)

    async def _slow(self) -> None:
        await self._read_stream(pause_s=0.1)

    async def _leave_stream(self) -> None:
        post = question(self._rng, model=LEAVERS_MODEL, max_tokens=400, stream=True)
        num_events = self._rng.randint(0, 20)
        async with self._http.stream("POST", post.path, content=post.content) as response:
            if self._is_right(post, response):
                async for _ in response.aiter_lines():
                    num_events -= 1
                    if num_events < 0:
                        return

    async def _leave_early(self) -> None:
        fields = {"stream": self._rng.random() < 0.5, "n": self._rng.randint(1, 3)}
        await self._leave(question(self._rng, model=LEAVERS_MODEL, max_tokens=400, **fields))

    async def _large_and_leave(self) -> None:
        await self._leave(self._rng.choice(self._large))

    async def _leave(self, post: Post) -> None:
        try:
            timeout = self._rng.uniform(0.01, 0.5)
            await asyncio.wait_for(self._http.post(post.path, content=post.content), timeout)
        except (TimeoutError, httpx2.HTTPError):  # a body may be refused before it is sent
            pass

    async def _ask(self, post: Post) -> None:
        response = await self._http.post(post.path, content=post.content)
        if self._is_right(post, response) and "choices" in response.json():
            self._report.add_usage(response.json()["usage"], len(response.json()["choices"]))

    async def _read_stream(self, *, pause_s: float) -> None:
        post = question(self._rng, stream=True, stream_options={"include_usage": True})
        last = ""
        async with self._http.stream("POST", post.path, content=post.content) as response:
            if not self._is_right(post, response):
                return
            async for line in response.aiter_lines():
                last = line or last
                if '"choices":[]' in line:
                    self._report.add_usage(json.loads(line.removeprefix("data: "))["usage"], 1)
                await asyncio.sleep(pause_s)
        if last != "data: [DONE]":
            self._report.wrong.append(f"a stream ended with {last[:200]!r}")

    def _is_right(self, post: Post, response: httpx2.Response) -> bool:
        """Count the status; True for a 200 that was expected."""
        status = response.status_code
        self._report.statuses[status] += 1
        if status not in (*post.statuses, 429):
            self._report.wrong.append(f"{post.path} {post.content[:60]!r}: status {status}, expected {post.statuses}")
        return status == 200 and 200 in post.statuses


async def run_clients(url: str, *, num_clients: int, seconds: float, seed: int) -> Report:
    """Let the clients act for a while."""
    report, large_posts = Report(), large()
    clients = [Client(url, random.Random(seed * 1000 + index), report, large_posts) for index in range(num_clients)]
    until_s = time.monotonic() + seconds
    await asyncio.gather(*(client.run(until_s) for client in clients))
    return report
