"""A server on a real port in a thread, with an engine that says what a test wrote for it."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import openai
import pytest
from fastapi import FastAPI

from engine.errors import OrderError, RequestError
from engine.inlet import Inlet
from engine.types import (
    CallOff,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    LayerCheck,
    OrderKind,
    TokenLogprobs,
)
from engine.validate import RequestLimits, check_request, refusal_output
from loaders.phases import StartProgress
from loaders.tokenizer import Tokenizer, load_tokenizer
from server.api_server import ApiServer
from server.app import create_app
from server.config import ServerConfig
from server.listener import bind, url_of
from server.uvicorn_server import DrainingServer, make_uvicorn_config
from tests.server.api_threads import ApiThreads

MODEL = "tiny"
ASSETS = Path(__file__).resolve().parents[2] / "assets" / "tiny-gpt-oss"
MAX_MODEL_LEN = 4096
MAX_REQUESTS = 100
VOCAB_SIZE = 4096
NUM_API_WORKERS = int(os.environ.get("API_WORKERS", "1"))
"""HTTP processes of the services that tests start: threads here, processes in `service_process`."""

one_process_only = pytest.mark.skipif(NUM_API_WORKERS > 1, reason="looks into the only HTTP process")
LIMITS = RequestLimits(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, num_kv_tokens=MAX_MODEL_LEN)


@dataclass
class FakeEngine:
    """Answers every request with `script(request)`: token ids, some in one output if they come as a list."""

    script: Callable[[EngineRequest], Sequence[int | list[int]]] = lambda _request: []
    ready: bool = True
    alive: bool = True
    failure: str | None = None
    heartbeat_age_s: float = 0.0
    start_progress: StartProgress | None = None
    delay_s: float = 0.0
    last: Callable[[EngineRequest, int], dict] | None = None  # more fields of the last output
    requests: list[EngineRequest] = field(default_factory=list)
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    orders: list[OrderKind] = field(default_factory=list)
    refusal: str | None = None  # of orders

    expert_load = None

    @property
    def info(self) -> EngineInfo | None:
        if not self.ready:
            return None
        return EngineInfo(
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            page_size=16,
            num_pages=100,
            num_kv_tokens=1600,
            max_requests=MAX_REQUESTS,
            device="cpu",
            dtype="float32",
            moe_paths=["layer 0: torch / none / mxfp4"],
            load_seconds=0.1,
            selfcheck=[LayerCheck(layer=0, path="torch/none/mxfp4", worst_error=2e-6, tolerance=1e-5)],
        )

    @property
    def stats(self) -> EngineStats:
        names = (name for name in EngineStats.__struct_fields__ if name.startswith("num_"))
        return EngineStats(**{name: 0 for name in names} | {"num_running": len(self.running), "step_sizes": [0] * 14})

    def submit(self, request: EngineRequest, inlet: Inlet) -> None:
        try:
            check_request(request, LIMITS)
        except RequestError as error:
            inlet.put(refusal_output(request.request_id, error))
            return
        self.requests.append(request)
        playing = self._play(self._steps(request), inlet)
        self.running[request.request_id] = asyncio.ensure_future(playing)

    def drop(self, request_id: str) -> None:
        task = self.running.pop(request_id, None)
        if task is not None:
            task.cancel()
            self.aborted.append(request_id)

    def on_call_off(self, hook: Callable[[CallOff], None]) -> None:
        self.__dict__.setdefault("hooks", []).append(hook)  # no field, so that a fresh state keeps them

    def call_off(self, call: CallOff) -> None:
        for hook in self.hooks:
            hook(call)

    async def order(self, kind: OrderKind) -> None:
        if self.refusal is not None:
            raise OrderError(self.refusal)
        self.orders.append(kind)

    def forget(self) -> None:
        """Forget what was asked and aborted so far, for the next row of a table."""
        self.requests.clear()
        self.aborted.clear()

    async def _play(self, steps: list[EngineOutput], inlet: Inlet) -> None:
        for step in steps:
            await asyncio.sleep(self.delay_s)
            if step is steps[-1]:
                del self.running[step.request_id]
            inlet.put(step)

    def _steps(self, request: EngineRequest) -> list[EngineOutput]:
        chunks = [[chunk] if isinstance(chunk, int) else list(chunk) for chunk in self.script(request)] or [[]]
        room = request.sampling.max_tokens
        is_cut = sum(map(len, chunks)) > room
        steps, num_tokens = [], 0
        for chunk in chunks:
            ids = chunk[: room - num_tokens]
            num_tokens += len(ids)
            logprobs = None if request.sampling.logprobs is None else [fake_logprobs(i, request) for i in ids]
            steps.append({"request_id": request.request_id, "token_ids": ids, "logprobs": logprobs})
            if num_tokens >= room:
                break
        if request.sampling.prompt_logprobs is not None:
            steps[0]["prompt_logprobs"] = [None, *(fake_logprobs(i, request) for i in request.prompt_ids[1:])]
        steps[-1]["finish_reason"] = "length" if is_cut else "stop"
        if self.last is not None:
            steps[-1].update(self.last(request, num_tokens))
        return [EngineOutput(**step) for step in steps]


def fake_logprobs(token_id: int, request: EngineRequest) -> TokenLogprobs:
    """Alternatives whose numbers tell which token they belong to."""
    count = request.sampling.logprobs or 0
    top = [(token_id + offset, -(token_id + offset) / 1000) for offset in range(count)]
    return TokenLogprobs(token_id, -token_id / 1000, top)


@dataclass
class Service:
    """A running server, its engine and an address."""

    engine: FakeEngine
    url: str
    apps: list[FastAPI]  # one for each HTTP process
    servers: list[DrainingServer] | list[ApiServer]

    @property
    def app(self) -> FastAPI:
        return self.apps[0]

    @property
    def server(self) -> DrainingServer | ApiServer:
        """The only one: for tests of what concerns one process."""
        [server] = self.servers
        return server

    @property
    def num_inflight(self) -> int:
        return sum(app.state.context.gate.num_inflight for app in self.apps)

    def client(self, **options: object) -> openai.OpenAI:
        """Without TLS, whose certificates would take 20 ms to load, here and below."""
        given = {"api_key": "none", "max_retries": 0, "http_client": openai.DefaultHttpxClient(verify=False), **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **given)

    def http(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=20, verify=False)


class ServerThread(threading.Thread):
    """Uvicorn in a thread with its own loop."""

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        super().__init__(daemon=True)
        self.listener = bind("127.0.0.1", 0)
        self.url = url_of(self.listener)
        self.server = DrainingServer(make_uvicorn_config(app, config), app.state.context)
        self.apps, self.servers = [app], [self.server]

    def run(self) -> None:
        asyncio.run(self.server.serve(sockets=[self.listener]))

    def __enter__(self) -> "ServerThread":
        self.start()
        wait_until(lambda: self.server.started)
        return self

    def __exit__(self, *_exc: object) -> None:
        self.server.should_exit = True
        self.join(20)


def read_to_end(connection):
    """What a socket receives until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for a condition; the test fails if it does not come true."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "the condition did not come true"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ASSETS)


@pytest.fixture(scope="module")
def shared_service(tokenizer: Tokenizer) -> Iterator[Service]:
    with serve(FakeEngine(), tokenizer) as service:
        yield service


@pytest.fixture
def service(shared_service: Service) -> Service:
    """The module's server, with a fresh engine state."""
    fresh = FakeEngine()
    shared_service.engine.__dict__.update(fresh.__dict__)
    return shared_service


class serve:
    """`with serve(engine, tokenizer, api_key="x") as service:`"""

    def __init__(self, engine: FakeEngine, tokenizer: Tokenizer, **settings: object) -> None:
        config = ServerConfig(**{"served_model_name": (MODEL,), "log_level": "error", **settings})
        self._engine = engine
        if NUM_API_WORKERS > 1:
            self._thread = ApiThreads(engine, tokenizer, config, NUM_API_WORKERS)
        else:
            self._thread = ServerThread(create_app(engine, tokenizer, config), config)
        self.is_alive = self._thread.is_alive
        self.join = self._thread.join

    def __enter__(self) -> Service:
        self._thread.__enter__()
        return Service(self._engine, self._thread.url, self._thread.apps, self._thread.servers)

    def __exit__(self, *exc: object) -> None:
        self._thread.__exit__(*exc)


class Harmony:
    """Writes transcripts as token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Ids of a transcript in which control tokens are spelled out."""
        return self._tokenizer.encode(text)


@pytest.fixture(scope="session")
def harmony(tokenizer: Tokenizer) -> Harmony:
    return Harmony(tokenizer)


ANSWER = (
    "<|channel|>analysis<|message|>The user asks for a capital.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>The capital of France is Paris.<|return|>"
)
CALL = (
    "<|channel|>analysis<|message|>I need the weather.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
    '<|message|>{"city": "Paris"}<|call|>'
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
