"""The least that streaming can cost: one `write` for each token, of bytes that are ready. For `bench_http`.

A timer in the same process stands for the engine, so there are no messages, no parsing, no text: what this takes is the
kernel's work on the sockets, of which a server that sends every token as it comes can save nothing.
"""

import asyncio
import resource
import sys

_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","created":1795829123,"model":"tiny","system_fingerprint":'
    b'"moe-serve-0.1.0","object":"text_completion","choices":[{"index":0,"text":"word","logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_END = b"data: [DONE]\n\n"


class _Streams:
    """Writes an event to every client at a fixed pace."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._left: dict[asyncio.Transport, int] = {}

    def add(self, transport: asyncio.Transport, num_tokens: int) -> None:
        if not self._left:
            asyncio.get_running_loop().call_later(self._step_s, self._step)
        transport.write(_HEAD)
        self._left[transport] = num_tokens

    def _step(self) -> None:
        for transport, left in list(self._left.items()):
            transport.write(_CHUNK)
            self._left[transport] = left - 1
            if left == 1:
                del self._left[transport]
                transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(_END), _END))
        if self._left:
            asyncio.get_running_loop().call_later(self._step_s, self._step)


class _Client(asyncio.Protocol):
    def __init__(self, streams: _Streams) -> None:
        self._streams = streams

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        num_tokens = int(data.partition(b'"max_tokens": ')[2].partition(b",")[0])
        self._streams.add(self._transport, num_tokens)  # type: ignore[arg-type]


async def serve(step_s: float) -> None:
    """Prints its port, then its CPU seconds each time it reads a line, until its standard input ends."""
    loop = asyncio.get_running_loop()
    streams, ended = _Streams(step_s), loop.create_future()
    server = await loop.create_server(lambda: _Client(streams), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)

    def tell() -> None:
        if sys.stdin.readline():
            usage = resource.getrusage(resource.RUSAGE_SELF)
            print(usage.ru_utime + usage.ru_stime, flush=True)
        elif not ended.done():
            ended.set_result(None)

    loop.add_reader(sys.stdin, tell)
    await ended
