"""A small OpenAI-like server in a thread whose answers the test writes: any chunking, errors, hangs, broken streams."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Asked:
    """One request: its path, headers, JSON body, and how many came before it on the same connection."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any] | None
    place: int


@dataclass
class FakeServer:
    """Calls `answer(asked, writer)` for every request; closes the connection if that raises ConnectionError."""

    answer: Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]
    asked: list[Asked] = field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def posts(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.body is not None]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        place = 0
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                data = await reader.readexactly(int(headers.get("content-length", 0)))
                asked = Asked(first.split()[1], headers, json.loads(data) if data else None, place)
                self.asked.append(asked)
                place += 1
                await self.answer(asked, writer)
                await writer.drain()
        self.num_open -= 1


@contextlib.contextmanager
def serve(answer: Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]) -> Iterator[FakeServer]:
    server = FakeServer(answer)
    loop = asyncio.new_event_loop()
    started, stop = threading.Event(), asyncio.Event()

    async def main() -> None:
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.port = listener.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        listener.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # closed transports close their sockets in the loop's next turn

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    started.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def whole(content: Any, status: int = 200) -> bytes:
    """A response with a Content-Length."""
    body = json.dumps(content).encode()
    return b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(payload: Any) -> bytes:
    return b"data: " + (payload if isinstance(payload, bytes) else json.dumps(payload).encode()) + b"\n\n"


def text_chunk(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more}


def usage_of(prompt: int, completion: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


def num_prompt_tokens(body: dict[str, Any]) -> int:
    """Ids count one each; a word has two tokens, and the template of a chat has seven."""
    if "messages" in body:
        return 7 + 2 * sum(len(message["content"].split()) for message in body["messages"])
    prompt = body["prompt"]
    return len(prompt) if isinstance(prompt, list) else 2 * len(prompt.split())


async def polite(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """Answers as vLLM and moe-serve do: one chunk a token, its usage in it where the client asks for that."""
    if asked.path.endswith("/models"):
        writer.write(whole({"data": [{"id": "fake"}]}))
    elif asked.path == "/version":
        writer.write(whole({"version": "9.9"}))
    else:
        body = asked.body or {}
        options, num_prompt, num_tokens = body.get("stream_options") or {}, num_prompt_tokens(body), body["max_tokens"]
        writer.write(STREAM_HEAD)
        for number in range(1, num_tokens + 1):
            more = usage_of(num_prompt, number) if options.get("continuous_usage_stats") else {}
            finish = "length" if number == num_tokens else None
            writer.write(chunked(event(text_chunk("a", finish, **more))))
            await writer.drain()
        if options.get("include_usage"):
            writer.write(chunked(event({"choices": [], **usage_of(num_prompt, num_tokens)})))
        writer.write(chunked(event(b"[DONE]")) + END)
