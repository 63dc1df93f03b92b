"""`python -m tests.soak`: prints what was seen, the last line as JSON; ends with status 1 if anything was wrong."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.soak.run import Plan, soak


def main() -> int:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(description="Unruly clients against the real service.")
    parser.add_argument("--seconds", type=float, default=60, help="how long the clients act [60]")
    parser.add_argument("--seed", type=int, default=1, help="what they do follows from it [1]")
    parser.add_argument("--clients", type=int, default=48, help="how many there are [48]")
    parser.add_argument("flags", nargs="*", help="flags of the service, after --")
    arguments = parser.parse_args()
    plan = Plan(
        seconds=arguments.seconds,
        warm_up_seconds=max(60, arguments.seconds / 5),  # large bodies take arenas to their size
        rest_seconds=30,
        num_clients=arguments.clients,
        seed=arguments.seed,
        flags=tuple(arguments.flags),
    )
    with tempfile.TemporaryDirectory() as folder:
        result = soak(plan, Path(folder))
        log = (Path(folder) / "err").read_text()
    for fault in result.faults:
        print("FAULT", fault)
    if result.faults:
        print(log[-5000:], file=sys.stderr)
    print(json.dumps({"passed": not result.faults, **result.numbers}))
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())
