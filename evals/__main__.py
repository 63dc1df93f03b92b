"""Runs an eval by name against a running server: `python -m evals tiny --base-url http://127.0.0.1:8000/v1`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from evals import compare, logits, matrix, perplexity, run, tiny
from evals.client import ServerError

PARTS = {"tiny": tiny, "run": run, "compare": compare, "perplexity": perplexity, "logits": logits, "matrix": matrix}


def main() -> int:
    """Run an eval. Exit status: 0 if every bar is met, 1 if not, 2 if the eval could not run."""
    parser = argparse.ArgumentParser(prog="python -m evals", description=__doc__, allow_abbrev=False)
    names = parser.add_subparsers(dest="name", required=True)
    for name, part in PARTS.items():
        one = names.add_parser(name, help=part.__doc__, description=part.__doc__, allow_abbrev=False)
        part.add_arguments(one)
        one.set_defaults(run=part.main)
    args = parser.parse_args()
    try:
        return int(args.run(args))
    except (ServerError, ValueError, OSError) as error:
        print(f"evals: {error}", file=sys.stderr)
        return 2


def run_program() -> NoReturn:
    """Run `main` as the whole program, which does not wait for requests that still run.

    A signal ends it at once, with one line and the status that a shell expects.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` sets it
            signal.signal(number, _stop)
    try:
        status = main()
    except _Stopped as stopped:
        print(f"evals: stopped by {stopped}", file=sys.stderr, flush=True)
        status = stopped.status
    sys.stdout.flush()
    os._exit(status)  # a usual exit would wait for threads, and so for a server that hangs


class _Stopped(BaseException):
    """A signal, which ends servers and processes that the program has started on its way up."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    raise _Stopped(number)


if __name__ == "__main__":
    run_program()
