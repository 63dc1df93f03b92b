"""Replicas of the service as an application of Ray Serve: `serve run deploy.ray_serve:app flags="--model ..."`.

Each replica runs `moe-serve` as a process of its own and passes requests through, so Ray's environment needs neither
torch nor this package: only the program, in PATH or named by `command`. Needs ray[serve] 2.60 or newer, and util-linux.

Ray sends requests of a session (header x-session-id) to one replica, whose prefix cache has what they share; requests
without that header are spread over all. Ray starts a replica anew whose process has ended or is not alive.
"""

import asyncio
import json
import logging
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import IO, cast

import aiohttp
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

_DRAIN_S = 25.0  # the default of --drain-timeout
_LEFT_TO_EXIT_S = 10.0
_LAST_WORDS_S = 1.0  # for the error events of streams
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "proxy-connection"}
_OURS = {"host", "content-length", "expect", "x-forwarded-for"}
_SET_BY_RAY = {"date", "server"}
_ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
_log = logging.getLogger("ray.serve")


class Options(BaseModel):
    """What `serve run` takes as NAME=VALUE. With `max_replicas`, Ray adds and removes replicas by running requests."""

    model_config = ConfigDict(extra="forbid")

    flags: str = ""
    command: str = "moe-serve"
    replicas: int = 2
    max_replicas: int | None = None
    target_requests: float = 32
    gpus: float = 1
    cpus: float = 1
    max_requests: int = 256
    drain_timeout: float = _DRAIN_S


@serve.deployment
class Replica:
    """One service, on a free port of this host, and the requests that go through to it."""

    def __init__(self, options: Options) -> None:
        # Without a parent that can tell it to end, the service drains and ends on its own (--pdeathsig).
        command = ["setpriv", "--pdeathsig", "TERM", *shlex.split(options.command), *shlex.split(options.flags)]
        command += [
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--client-header",
            "X-Forwarded-For",
            "--exit-on-engine-death",
        ]
        command += ["--drain-timeout", str(options.drain_timeout)]
        self._drain_s = options.drain_timeout
        self._is_ending = False
        self._http: aiohttp.ClientSession | None = None
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        lines = cast(IO[str], self._process.stdout)
        self._address = _address_at_ready(lines)
        if self._address is None:
            raise RuntimeError(
                f"moe-serve ended with status {self._process.wait()} before it was ready; its log says why"
            )
        # The service may write more, and must not wait for a reader.
        threading.Thread(target=lines.read, daemon=True).start()
        threading.Thread(target=self._end_with_service, daemon=True).start()

    async def __call__(self, request: Request) -> Response:
        """Pass a request through, and its answer: streams as they come. 503 if the service ends before it answers."""
        headers = {name: value for name, value in request.headers.items() if name not in _HOP_BY_HOP | _OURS}
        headers["x-forwarded-for"] = request.client.host if request.client else "unknown"
        url = f"{self._address}{request.url.path}" + (f"?{request.url.query}" if request.url.query else "")
        try:
            answer = await self._session().request(
                request.method, url, headers=headers, data=await request.body(), allow_redirects=False
            )
            is_stream = answer.content_type == "text/event-stream"
            whole = b"" if is_stream else await answer.read()
        except aiohttp.ClientError as error:
            _log.warning("no answer from the service of this replica: %r", error)
            return JSONResponse(_unavailable(), 503, headers={"retry-after": "1"})
        kept = {name: text for name, text in answer.headers.items() if name.lower() not in _HOP_BY_HOP | _SET_BY_RAY}
        if is_stream:
            return StreamingResponse(_parts(answer), answer.status, headers=kept)
        return Response(whole, answer.status, headers=kept)

    async def check_health(self) -> None:
        """Ray asks this every few seconds, and starts the replica anew if it raises."""
        if (status := self._process.poll()) is not None:
            raise RuntimeError(f"moe-serve has ended with status {status}")
        async with self._session().get(f"{self._address}/health/live", timeout=aiohttp.ClientTimeout(5)) as answer:
            if answer.status != 200:
                raise RuntimeError(f"/health/live answers {answer.status}: {await answer.text()}")

    async def __del__(self) -> None:
        """Ray calls this when it takes the replica away, and no request runs any more."""
        self._is_ending = True
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, self._drain_s + _LEFT_TO_EXIT_S)
        self._process.kill()

    def _end_with_service(self) -> None:
        """End this actor soon after its service: Ray's proxies then choose others at once, not after failed checks."""
        status = self._process.wait()
        if not self._is_ending:
            _log.error("moe-serve has ended with status %d; so does this replica", status)
            time.sleep(_LAST_WORDS_S)
            os._exit(1)

    def _session(self) -> aiohttp.ClientSession:
        """Made at the first use, on the loop that uses it."""
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=None)
            connector = aiohttp.TCPConnector(limit=0)
            self._http = aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)
        return self._http


async def _parts(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body as it comes. A stream that breaks off ends with an error event."""
    try:
        async with answer:  # a client that leaves closes it, which aborts the request
            async for part in answer.content.iter_any():
                yield part
    except aiohttp.ClientError as error:
        _log.warning("the service of this replica broke off an answer: %r", error)
        yield b"\n\ndata: " + json.dumps(_unavailable()).encode() + b"\n\n"


def _unavailable() -> dict[str, dict[str, str | None]]:
    """The service's own answer while it cannot take requests."""
    message = "this replica has ended; another takes its place"
    return {"error": {"message": message, "type": "server_error", "param": None, "code": "unavailable"}}


def _address_at_ready(lines: IO[str]) -> str | None:
    """From the line of JSON that the service writes when it is ready; None if it ends before."""
    for line in lines:
        with suppress(json.JSONDecodeError):
            said = json.loads(line)
            if said["event"] == "ready":
                return str(said["url"]).removesuffix("/v1")
    return None


def app(options: Options) -> serve.Application:
    """What `serve run` and `serve deploy` build."""
    scale = {"num_replicas": options.replicas}
    if options.max_replicas is not None:
        bounds = {"min_replicas": options.replicas, "max_replicas": options.max_replicas}
        scale = {"autoscaling_config": AutoscalingConfig(**bounds, target_ongoing_requests=options.target_requests)}
    return Replica.options(
        **scale,
        ray_actor_options={"num_gpus": options.gpus, "num_cpus": options.cpus},
        max_ongoing_requests=options.max_requests,
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=2 * (options.drain_timeout + _LEFT_TO_EXIT_S),
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
    ).bind(options)
