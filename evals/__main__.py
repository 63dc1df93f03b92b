"""Runs an eval by name against a running server: `python -m evals tiny --base-url http://127.0.0.1:8000/v1`."""

from __future__ import annotations

import argparse
import sys

from evals import tiny
from evals.client import ServerError


def main() -> int:
    """Exit status: 0 bars met, 1 not met, 2 could not run."""
    parser = argparse.ArgumentParser(prog="python -m evals", description=__doc__, allow_abbrev=False)
    names = parser.add_subparsers(dest="name", required=True)
    tiny.add_arguments(names.add_parser("tiny", help=tiny.__doc__, allow_abbrev=False))
    try:
        return tiny.main(parser.parse_args())
    except (ServerError, ValueError) as error:
        print(f"evals: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
