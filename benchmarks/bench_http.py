"""CPU time of the HTTP process per streamed token, with an engine that only hands out tokens.

    python -m benchmarks.bench_http [--protocol h11 httptools] [--streams 1 32] [--tokens 1000] [--out NAME]
    python -m benchmarks.bench_http --other FOLDER    # in turns with another checkout that has this file too
    python -m benchmarks.bench_http --api-workers 1 2 --streams 64 256    # in turns; also prints tokens per second

Server and engine run in separate processes, as in the service; the clients are threads with plain sockets. A figure is
the server's user and system time, of all its HTTP processes together, divided by the number of tokens; protocols and
checkouts take turns, and the median counts: what a token costs depends on which core its reader runs on, so single
runs differ by half. `httptools` is uvicorn's default parser; install it to measure it. `bare` is no server but the
least that one can cost, see `bare_stream`. The last line is JSON.
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
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import uvloop

from benchmarks import bare_stream, http_worker, record

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "tiny-gpt-oss"
TOKEN_ID = 300


async def serve(protocol: str, api_workers: int) -> None:
    """The HTTP process, or their supervisor: prints its port, then its CPU seconds each time it reads a line."""
    from engine.client import EngineClient
    from engine.config import EngineConfig
    from loaders.tokenizer import load_tokenizer
    from server.app import create_app
    from server.config import ServerConfig
    from server.listener import bind
    from server.memory import settle_memory
    from server.supervisor import Supervisor
    from server.uvicorn_server import DrainingServer, make_uvicorn_config

    engine_config = EngineConfig(model=ASSETS, max_num_seqs=256)
    engine = EngineClient(engine_config, worker_module="benchmarks.http_worker")
    await engine.start()
    while not engine.ready:
        await asyncio.sleep(0.01)
    config = ServerConfig(log_level="error", served_model_name=("tiny",), api_workers=api_workers)
    server: DrainingServer | Supervisor
    if api_workers > 1:
        server = Supervisor(engine, config, engine_config)
    else:
        app = create_app(engine, load_tokenizer(ASSETS), config)
        uvicorn_config = make_uvicorn_config(app, config)
        if protocol == "httptools":
            from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

            uvicorn_config.http = HttpToolsProtocol
        server = DrainingServer(uvicorn_config, app.state.context)
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]

    def tell() -> None:
        if sys.stdin.readline():
            print(cpu_s_of_http_processes(engine.pid), flush=True)
        else:
            server.should_exit = True

    async def announce() -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        settle_memory()
        print(port, flush=True)

    asyncio.get_running_loop().add_reader(sys.stdin, tell)
    announcing = asyncio.ensure_future(announce())
    await server.serve(sockets=[listener])
    await announcing
    await engine.close()


def cpu_s_of_http_processes(engine_pid: int | None) -> float:
    """CPU seconds of this process and of its children but the engine, so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = usage.ru_utime + usage.ru_stime
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if int(pid) != engine_pid:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


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


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is compared: a parser, a number of HTTP processes, and the server's code, which is this one by default."""

    protocol: str
    api_workers: int = 1
    checkout: Path | None = None


def measure(run: Run, num_streams: int, num_tokens: int, step_s: float) -> tuple[float, float]:
    """Microseconds of CPU per token, and tokens per second."""
    environ = os.environ | {http_worker.STEP_S: str(step_s)}
    command = [sys.executable, "-m", "benchmarks.bench_http", "--serve", run.protocol]
    if run.api_workers > 1:
        command += ["--api-workers", str(run.api_workers)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ, cwd=run.checkout) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("no pipes")
        stdin, stdout = process.stdin, process.stdout
        port = int(stdout.readline())

        def cpu_s() -> float:
            print(file=stdin, flush=True)
            return float(stdout.readline())

        for _ in range(2 * run.api_workers):  # warm up
            read_stream(port, 200)
        before_s, start_s = cpu_s(), time.monotonic()
        clients = [threading.Thread(target=read_stream, args=(port, num_tokens)) for _ in range(num_streams)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        used_s, wall_s = cpu_s() - before_s, time.monotonic() - start_s
        stdin.close()
        process.wait(30)
    return used_s / (num_streams * num_tokens) * 1e6, num_streams * num_tokens / wall_s


def main() -> None:
    """Measure all protocols in turn and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protocol", nargs="+", default=["h11"], choices=["h11", "httptools", "bare"])
    parser.add_argument("--api-workers", nargs="+", type=int, default=[1], help="numbers of HTTP processes, in turns")
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
            if args.serve == "bare":
                runner.run(bare_stream.serve(float(os.environ[http_worker.STEP_S])))
            else:
                runner.run(serve(args.serve, args.api_workers[0]))
        return
    runs = {protocol: Run(protocol=protocol) for protocol in args.protocol} if 1 in args.api_workers else {}
    for number in args.api_workers:
        if number > 1:
            runs[f"{number} processes"] = Run(protocol=args.protocol[0], api_workers=number)
    if args.other is not None:
        runs["other"] = Run(protocol=args.protocol[0], checkout=args.other)
    us_per_token: dict[str, dict[str, float]] = {}
    us_of_rounds: dict[str, dict[str, list[float]]] = {}
    for num_streams in args.streams:
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        step_s = max(args.step_s, num_streams * args.step_s_per_stream)
        for _ in range(args.rounds):
            for name, run in runs.items():
                rounds[name].append(measure(run, num_streams, args.tokens, step_s))
        us_of_rounds[str(num_streams)] = {name: [round(us, 1) for us, _ in each] for name, each in rounds.items()}
        us_per_token[str(num_streams)] = {
            name: round(median(figures), 1) for name, figures in us_of_rounds[str(num_streams)].items()
        }
        fastest = {name: round(max(per_s for _, per_s in each)) for name, each in rounds.items()}
        print(f"{num_streams} streams: {us_per_token[str(num_streams)]} us of CPU a token, {fastest} tokens/s")
    settings = ("tokens", "step_s", "step_s_per_stream", "rounds")
    result: dict[str, object] = {name: getattr(args, name) for name in settings}
    result["us_of_cpu_per_token"] = us_per_token
    result["us_of_each_round"] = us_of_rounds
    for rival in set(runs) - {args.protocol[0]} if args.protocol[0] in runs else ():
        ratios = {streams: round(us[args.protocol[0]] / us[rival], 3) for streams, us in us_per_token.items()}
        result[f"{args.protocol[0]}_to_{rival}"] = ratios
    record.write(args.out, {**record.environment(), **result}, args.folder)
    print(json.dumps(us_per_token))


if __name__ == "__main__":
    main()
