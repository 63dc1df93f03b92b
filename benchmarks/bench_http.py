"""CPU time of the HTTP process per streamed token, with an engine that only hands out tokens.

    python -m benchmarks.bench_http [--protocol h11 httptools] [--streams 1 32] [--tokens 1000] [--out NAME]
    python -m benchmarks.bench_http --other FOLDER    # in turns with another checkout that has this file too

Server and engine run in separate processes, as in the service; the clients are threads with plain sockets. A figure is
the server's user and system time divided by the number of tokens; protocols and checkouts take turns, and the smallest
figure counts, because other work on the machine only adds. `httptools` is uvicorn's default parser; install it to
measure it. The last line is JSON.
"""

import argparse
import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from pathlib import Path

import uvloop

from benchmarks import http_worker, record

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "tiny-gpt-oss"
TOKEN_ID = 300


async def serve(protocol: str) -> None:
    """The HTTP process: prints its port, then its CPU seconds each time it reads a line."""
    from engine.client import EngineClient
    from engine.config import EngineConfig
    from loaders.tokenizer import load_tokenizer
    from server.app import create_app
    from server.config import ServerConfig
    from server.listener import bind
    from server.uvicorn_server import DrainingServer, make_uvicorn_config

    engine = EngineClient(EngineConfig(model=ASSETS, max_num_seqs=256), worker_module="benchmarks.http_worker")
    await engine.start()
    while not engine.ready:
        await asyncio.sleep(0.01)
    config = ServerConfig(log_level="error")
    app = create_app(engine, load_tokenizer(ASSETS), config)
    uvicorn_config = make_uvicorn_config(app, config)
    if protocol == "httptools":
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

        uvicorn_config.http = HttpToolsProtocol
    server = DrainingServer(uvicorn_config, app.state.context)
    listener = bind("127.0.0.1", 0)

    def tell() -> None:
        if sys.stdin.readline():
            usage = resource.getrusage(resource.RUSAGE_SELF)
            print(usage.ru_utime + usage.ru_stime, flush=True)
        else:
            server.should_exit = True

    asyncio.get_running_loop().add_reader(sys.stdin, tell)
    print(listener.getsockname()[1], flush=True)
    await server.serve(sockets=[listener])
    await engine.close()


def read_stream(port: int, num_tokens: int) -> None:
    """One client: asks for a stream and reads it to its end."""
    fields = {"prompt": [TOKEN_ID], "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    body = json.dumps(fields).encode()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body,
        )
        tail, num_events = b"", 0
        while b"[DONE]" not in tail:
            data = connection.recv(65536)
            if not data:
                raise RuntimeError("the stream ended early")
            num_events += data.count(b"data: ")  # rarely cut between two reads
            tail = (tail + data)[-64:]
    if num_events < 0.9 * num_tokens:
        raise RuntimeError(f"{num_events} events for {num_tokens} tokens: they were not streamed one by one")


def measure(protocol: str, num_streams: int, num_tokens: int, step_s: float, checkout: Path | None = None) -> float:
    """Microseconds of CPU per token. `checkout` has the server's code, this one by default."""
    environ = os.environ | {http_worker.STEP_S: str(step_s)}
    command = [sys.executable, "-m", "benchmarks.bench_http", "--serve", protocol]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ, cwd=checkout) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("no pipes")
        stdin, stdout = process.stdin, process.stdout
        port = int(stdout.readline())

        def cpu_s() -> float:
            print(file=stdin, flush=True)
            return float(stdout.readline())

        read_stream(port, 200)  # warm up
        before_s = cpu_s()
        clients = [threading.Thread(target=read_stream, args=(port, num_tokens)) for _ in range(num_streams)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        used_s = cpu_s() - before_s
        stdin.close()
        process.wait(30)
    return used_s / (num_streams * num_tokens) * 1e6


def main() -> None:
    """Measure all protocols in turn and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protocol", nargs="+", default=["h11"], choices=["h11", "httptools"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--tokens", type=int, default=1000, help="of a stream")
    parser.add_argument("--step-s", type=float, default=0.005, help="seconds of an engine step, at least")
    parser.add_argument("--step-s-per-stream", type=float, default=0.00015, help="so that many streams can keep up")
    parser.add_argument("--other", type=Path, help="another checkout to compare with; its figures are called `other`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="http", help="name of the JSON file")
    parser.add_argument("--folder", type=Path, default=record.RESULTS, help="where it goes")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(args.serve))
        return
    runs: dict[str, tuple[str, Path | None]] = {protocol: (protocol, None) for protocol in args.protocol}
    if args.other is not None:
        runs["other"] = (args.protocol[0], args.other)
    us_per_token: dict[str, dict[str, float]] = {}
    for num_streams in args.streams:
        rounds: dict[str, list[float]] = {name: [] for name in runs}
        step_s = max(args.step_s, num_streams * args.step_s_per_stream)
        for _ in range(args.rounds):
            for name, (protocol, checkout) in runs.items():
                rounds[name].append(measure(protocol, num_streams, args.tokens, step_s, checkout))
        us_per_token[str(num_streams)] = {name: round(min(t), 1) for name, t in rounds.items()}
        print(f"{num_streams} streams: {us_per_token[str(num_streams)]} us of CPU a token")
    settings = ("tokens", "step_s", "step_s_per_stream", "rounds")
    result: dict[str, object] = {name: getattr(args, name) for name in settings}
    result["us_of_cpu_per_token"] = us_per_token
    for rival in set(runs) - {args.protocol[0]}:
        ratios = {streams: round(us[args.protocol[0]] / us[rival], 3) for streams, us in us_per_token.items()}
        result[f"{args.protocol[0]}_to_{rival}"] = ratios
    record.write(args.out, {**record.environment(), **result}, args.folder)
    print(json.dumps(us_per_token))


if __name__ == "__main__":
    main()
