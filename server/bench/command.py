"""`moe-serve bench`: from flags to a run, its table, JSON and plot."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server import streams
from server.errors import SettingError
from server.settings import Parser

if TYPE_CHECKING:
    from server.bench.config import BenchConfig

_DESCRIPTION = (
    "Send requests to an OpenAI-compatible server (moe-serve, vLLM, SGLang) and measure latency and throughput. "
    "A run in which a client process needed over 70 % of a core is void: it measured the client."
)
_EPILOG = (
    "`bench plot RECORD.json... --out FILE.png` draws what was measured. Exit status: 0 for a run that counts, 1 "
    "if it is void or no request finished, 2 for a wrong flag."
)
_DEFAULT_CONCURRENCY = 8
_DEFAULT_NUM_REQUESTS = 100


def bench(argv: Sequence[str], program: str, environ: Mapping[str, str]) -> int:
    """Run and print the table; returns the exit status. Raises SettingError for a wrong flag or an unusable server."""
    if argv and argv[0] == "plot":
        return _plot(argv[1:], program)
    flags = make_parser(program).parse_args(argv)
    # Imports numpy, which a wrong flag and --help need not wait for.
    from server.bench import report
    from server.bench.errors import BenchError
    from server.bench.plot import check_matplotlib, check_suffix, draw
    from server.bench.probe import probe
    from server.bench.processes import run_processes
    from server.bench.summary import summarize
    from server.bench.workload import Workload

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("loaders.progress").setLevel("INFO")
    try:
        if flags.plot is not None:
            check_suffix("--plot", flags.plot)
            check_matplotlib()
        config = make_config(flags, environ)
        for flag in ("json", "plot"):
            _check_can_write(f"--{flag}", getattr(flags, flag))
        accepted = asyncio.run(probe(config))
        Workload(config, accepted)  # a data set that cannot be read is refused here, not in a client process
        run = run_processes(config, accepted)
        summary = summarize(run)
        text = report.table(config, accepted, summary)
        streams.say(text)  # first, since a file may not be written after all
        if flags.json is not None:
            report.write_json(flags.json, report.document(config, accepted, summary, argv))
        if flags.plot is not None:
            draw(flags.plot, text.partition("\n")[0], run, summary)
    except BenchError as error:
        raise SettingError(str(error)) from error
    except OSError as error:  # of the two files
        raise SettingError(f"the result cannot be written: {error}") from error
    return 1 if summary.void_reasons or not summary.num_finished else 0


def _plot(argv: Sequence[str], program: str) -> int:
    from server.bench.errors import BenchError
    from server.bench.pictures import plot  # imports numpy

    try:
        return plot(argv, program)
    except BenchError as error:
        raise SettingError(str(error)) from error


def make_parser(program: str) -> Parser:
    """The flags of `moe-serve bench`."""
    parser = Parser(prog=f"{program} bench", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False)
    parser.first_words = ("plot",)
    add = parser.add_argument_group("server").add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="address of the server, with or without /v1 [%(default)s]")
    add("--model", help="model to ask for [the first one that the server lists]")
    add("--api-key", help="key of the server [the variable OPENAI_API_KEY]")
    add("--endpoint", choices=("completions", "chat"), default="completions", help="[%(default)s]")
    add("--timeout", type=float, default=600.0, help="seconds until a request counts as failed [%(default)g]")
    add = parser.add_argument_group("load").add_argument
    add("--concurrency", type=int, help=f"requests in flight, each stream one after the other [{_DEFAULT_CONCURRENCY}]")
    add("--request-rate", type=float, help="requests a second at random times (Poisson), instead of --concurrency")
    add("--num-requests", type=int, help=f"end after so many requests [{_DEFAULT_NUM_REQUESTS} without --seconds]")
    add("--seconds", type=float, help="end after so long; answers that are still running are cut")
    add("--warmup", type=int, help="requests sent before, not counted [the concurrency; 8 with --request-rate]")
    add("--processes", type=int, help="client processes [one for 64 streams or 50 requests/s, at most half the cores]")
    add = parser.add_argument_group("requests").add_argument
    add("--prompt-tokens", default="512", help="length of random prompts: N, or LOW-HIGH for even draws [%(default)s]")
    add("--answer-tokens", default="128", help="max_tokens of the answers: N or LOW-HIGH [%(default)s]")
    add("--ignore-eos", action="store_true", help="make every answer as long as --answer-tokens says")
    add("--dataset", type=Path, help="JSON lines with prompt or messages, and max_tokens if wanted, instead of "
        "random prompts")  # fmt: skip
    add("--vocab-size", type=int, default=4000, help="random token ids are below it [%(default)s]")
    add("--seed", type=int, default=0, help="the same seed sends the same requests [%(default)s]")
    add("--extra-body", default="{}", help="JSON object of more request fields, such as '{\"temperature\": 0}'")
    add = parser.add_argument_group("results").add_argument
    add("--json", type=Path, help="file for all figures, with the command and versions")
    add("--plot", type=Path, help="file for a picture of the distributions (.png, .svg or .pdf); needs matplotlib, the "
        "extra bench")  # fmt: skip
    return parser


def make_config(flags: argparse.Namespace, environ: Mapping[str, str]) -> "BenchConfig":
    """What the flags ask for. Raises BenchError."""
    from server.bench.config import BenchConfig, Lengths, default_processes
    from server.bench.connection import Target

    concurrency = flags.concurrency
    if concurrency is None and flags.request_rate is None:
        concurrency = _DEFAULT_CONCURRENCY
    num_requests = flags.num_requests
    if num_requests is None and flags.seconds is None:
        num_requests = _DEFAULT_NUM_REQUESTS
    processes = flags.processes
    return BenchConfig(
        target=Target.parse(flags.base_url, flags.api_key or environ.get("OPENAI_API_KEY") or None),
        endpoint=flags.endpoint,
        model=flags.model,
        concurrency=concurrency,
        request_rate=flags.request_rate,
        num_requests=num_requests,
        seconds=flags.seconds,
        warmup=flags.warmup if flags.warmup is not None else concurrency or _DEFAULT_CONCURRENCY,
        prompt_tokens=Lengths.parse("--prompt-tokens", flags.prompt_tokens),
        answer_tokens=Lengths.parse("--answer-tokens", flags.answer_tokens),
        dataset=flags.dataset,
        vocab_size=flags.vocab_size,
        ignore_eos=flags.ignore_eos,
        seed=flags.seed,
        timeout_s=flags.timeout,
        processes=processes if processes is not None else default_processes(concurrency, flags.request_rate),
        extra_body=_object(flags.extra_body),
    )


def _check_can_write(flag: str, path: Path | None) -> None:
    """Refuse a file that could not be written at the end of the run."""
    from server.bench.errors import BenchError

    if path is None:
        return
    if not path.parent.is_dir():
        raise BenchError(f"{flag}: {path.parent} is no folder; make it first")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BenchError(f"{flag}: {path} cannot be written")


def _object(text: str) -> dict[str, Any]:
    from server.bench.errors import BenchError
    from server.bench.workload import sendable_json

    try:
        found = sendable_json(text)
    except ValueError as error:
        raise BenchError(f"--extra-body: {text!r} is no JSON that can be sent: {error}") from error
    if not isinstance(found, dict):
        raise BenchError(f"--extra-body: {text!r} must be a JSON object")
    return found
