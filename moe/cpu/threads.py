"""How many CPUs this process may use: the minimum of its affinity mask and its cgroup CPU quota (v1 and v2).

`docker run --cpus 4` sets a quota but no mask, so 64 threads in such a container would share the time of 4 cores.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_PROC = Path("/proc/self")


def usable_cpus(proc: Path = _PROC) -> int:
    """Whole CPUs, at least 1. `proc` is the folder of this process in /proc."""
    return max(1, math.floor(min(len(os.sched_getaffinity(0)), cgroup_quota(proc))))


def cgroup_quota(proc: Path = _PROC) -> float:
    """CPU quota of this process: the minimum over its cgroup and all parents, infinite without a limit."""
    quotas = [_quota(folder) for mount in _mounts(proc) for folder in _folders(mount)]
    return min(quotas, default=math.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mount:
    """A mounted cgroup tree. `root` is the group that appears at `point`, `group` the one this process is in."""

    point: Path
    root: PurePosixPath
    group: PurePosixPath


def _mounts(proc: Path) -> Iterator[_Mount]:
    """The cgroup trees that can hold a CPU quota: v2's single tree and v1's tree of the cpu controller."""
    try:
        groups = _groups((proc / "cgroup").read_text())
        lines = (proc / "mountinfo").read_text().splitlines()
    except OSError:  # not Linux, or a sandbox without /proc
        return
    for line in lines:
        # Fields: three numbers, root, mount point, more; after the dash the type, the source and the tree's options.
        before, _, after = line.partition(" - ")
        fields, (kind, *_, options) = before.split(), after.split()
        controller = "" if kind == "cgroup2" else "cpu"
        if (kind == "cgroup2" or (kind == "cgroup" and "cpu" in options.split(","))) and controller in groups:
            yield _Mount(point=Path(fields[4]), root=PurePosixPath(fields[3]), group=groups[controller])


def _groups(text: str) -> dict[str, PurePosixPath]:
    """This process's group by controller, from lines "4:cpu,cpuacct:/group"; v2's has an empty name."""
    found: dict[str, PurePosixPath] = {}
    for line in text.splitlines():
        _, controllers, group = line.split(":", 2)
        found |= dict.fromkeys(controllers.split(","), PurePosixPath(group))
    return found


def _folders(mount: _Mount) -> Iterator[Path]:
    """The folders of the group and its parents, as far as they are mounted.

    A container sees its own group at the mount point, whatever path /proc gives. If that path is not below the root or
    leads out of the container, the mount point is the group.
    """
    inside = PurePosixPath()
    if mount.group.is_relative_to(mount.root) and ".." not in mount.group.parts:
        inside = mount.group.relative_to(mount.root)
    yield mount.point
    for depth in range(len(inside.parts)):
        yield mount.point.joinpath(*inside.parts[: depth + 1])


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
