"""How many CPUs this process may use: the minimum of its affinity mask and its cgroup CPU quota (v1 and v2).

`docker run --cpus 4` sets a quota but no mask, so 64 threads in such a container would share the time of 4 cores.
"""

import math
import os
from pathlib import Path

from moe.cpu.cgroups import PROC, group_folders


def usable_cpus(proc: Path = PROC) -> int:
    """Whole CPUs, at least 1. `proc` is the folder of this process in /proc."""
    return max(1, math.floor(min(len(os.sched_getaffinity(0)), cgroup_quota(proc))))


def cgroup_quota(proc: Path = PROC) -> float:
    """CPU quota of this process: the minimum over its cgroup and all parents, infinite without a limit."""
    quotas = map(_quota, group_folders("cpu", proc))
    return min(quotas, default=math.inf)


def _quota(folder: Path) -> float:
    """CPU quota of one group. v2 has "QUOTA PERIOD" or "max PERIOD" in cpu.max; v1 has two files, -1 for no limit."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # a group without the controller has no such files
        return math.inf
