"""How long a start takes: the first with an empty cache of Triton kernels, the others with what it left.

    python -m benchmarks.bench_start [--starts 2] [--out NAME] [--folder FOLDER] [-- FLAGS OF THE SERVICE]

For each start: seconds until it is ready, its phases, how many kernels were compiled or loaded ahead, and how many were
not and came late, one after another, while the start needed them. The last line is JSON.
"""

import argparse
import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import record
from scripts.card_end_to_end import service

_AHEAD = re.compile(r"(\S.*): compiled or loaded (\d+) kernels ahead in ([\d.]+) s with (\d+) workers")
_READY = re.compile(r"ready after [\d.]+ s: .*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One start. `num_ahead` kernels came from `ahead_s` seconds of compiling ahead, `num_late` new ones later."""

    ready_s: float
    num_ahead: int
    ahead_s: float
    num_late: int
    phases: str


def read_start(log: str, ready_s: float, num_new: int) -> Start:
    """A start by its log; `num_new` kernels are new in the cache on disk."""
    ahead = _AHEAD.findall(log)
    num_ahead = sum(int(count) for _, count, _, _ in ahead)
    phases = _READY.search(log)
    return Start(
        ready_s=ready_s,
        num_ahead=num_ahead,
        ahead_s=round(sum(float(seconds) for _, _, seconds, _ in ahead), 1),
        num_late=max(0, num_new - num_ahead),
        phases="" if phases is None else phases[0],
    )


def main() -> None:
    """Start several times with one cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--out", default="start")
    parser.add_argument("--folder", type=Path, default=record.RESULTS)
    parser.add_argument("flags", nargs="*", help="of the service, after --")
    args = parser.parse_args()
    starts: list[Start] = []
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "kernels"
        os.environ["TRITON_CACHE_DIR"] = str(cache)
        for number in range(args.starts):
            num_before, log = _num_kernels(cache), Path(folder) / f"{number}.log"
            with service(log, *args.flags) as (_, ready_s):
                text = log.read_text(encoding="utf-8")
            starts.append(read_start(text, ready_s, _num_kernels(cache) - num_before))
            print(*(line for line in text.splitlines() if "ahead" in line), starts[-1], sep="\n", flush=True)
    record.write(args.out, {**record.environment(), "starts": [asdict(start) for start in starts]}, args.folder)
    print(json.dumps([asdict(start) for start in starts]))


def _num_kernels(cache: Path) -> int:
    return sum(1 for _ in cache.rglob("*.cubin"))


if __name__ == "__main__":
    main()
