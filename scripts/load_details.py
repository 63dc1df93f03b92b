"""What processes and GPUs do under load: CPU time by process, and where the time of steps goes, from profiles.

Standard library only. A profile is the trace that a rank of a service with `--profile-dir` writes.
"""

from __future__ import annotations

import gzip
import json
import os
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

MOST_KERNELS = 14
_GPU_KINDS = {"kernel", "gpu_memcpy", "gpu_memset"}
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Processes that this one has started and that still run."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def cpu_seconds(server: int) -> dict[str, float]:
    """User and system time of a service's processes until now: "server" and its children, "engine.rank_worker 1"."""
    found: dict[str, float] = {}
    for number, pid in enumerate((server, *sorted(children(server)))):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        module = next((word for word in words if word.startswith(("engine.", "server."))), "process")
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        name = f"{module} {number - 1}" if number else "server"
        found[name] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return found


def give_order(url: str, order: str) -> None:
    """Have all ranks do something, such as "start_profile"."""
    with urllib.request.urlopen(urllib.request.Request(f"{url}/{order}", method="POST"), timeout=120):
        pass


def record_profile(url: str, seconds: float) -> None:
    """Have all ranks record their steps for so long."""
    give_order(url, "start_profile")
    time.sleep(seconds)
    give_order(url, "stop_profile")


def summarize_profile(file: Path) -> dict[str, Any]:
    """Of one trace: milliseconds, the share in which the GPU computed, and the kernels with the largest shares."""
    with gzip.open(file, "rt", encoding="utf-8") as opened:
        events = json.load(opened)["traceEvents"]
    spans = [
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event["name"]))
        for event in events
        if event.get("cat") in _GPU_KINDS
    ]
    if not spans:
        return {"file": file.name, "ms": 0.0, "kernels": []}
    start, stop = min(span[0] for span in spans), max(span[1] for span in spans)
    busy_us, end = 0.0, start
    by_name: dict[str, list[float]] = defaultdict(list)
    for begin, finish, name in sorted(spans):
        busy_us += max(0.0, finish - max(begin, end))
        end = max(end, finish)
        by_name[name].append(finish - begin)
    rows = [
        {
            "kernel": name[:100],
            "share": round(sum(times) / (stop - start), 4),
            "launches": len(times),
            "us_each": round(sum(times) / len(times), 1),
        }
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))
    ]
    return {
        "file": file.name,
        "ms": round((stop - start) / 1000, 1),
        "busy": round(busy_us / (stop - start), 4),
        "kernels": rows[:MOST_KERNELS],
    }
