"""Runs an eval by name against a running server: `python -m evals tiny --base-url http://127.0.0.1:8000/v1`."""

from __future__ import annotations

import argparse
import sys

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


if __name__ == "__main__":
    sys.exit(main())
