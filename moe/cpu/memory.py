"""How much host memory this process may use: that of the machine, or less where a cgroup (v1 or v2) limits it."""

import math
import os
from pathlib import Path

from moe.cpu.cgroups import PROC, group_folders

_MEMINFO = Path("/proc/meminfo")


def usable_bytes(proc: Path = PROC) -> int:
    """All of it, whatever is in use. `proc` is the folder of this process in /proc."""
    physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min(physical_bytes, *map(_limit, group_folders("memory", proc)), math.inf))


def free_bytes(proc: Path = PROC, meminfo: Path = _MEMINFO) -> int:
    """What is left of it. Cached files count as free: they give way."""
    available_bytes = _numbers(meminfo).get("MemAvailable:", 0) * 1024
    left = (_limit(folder) - _held(folder) for folder in group_folders("memory", proc))
    return int(max(0, min(available_bytes, *left, math.inf)))


def _limit(folder: Path) -> float:
    """Of one group, in bytes. v2 has a number or "max", v1 a number that no machine has for no limit."""
    return _first_number(folder / "memory.max", folder / "memory.limit_in_bytes", default=math.inf)


def _held(folder: Path) -> float:
    """Bytes that one group holds and that cannot give way."""
    used = _first_number(folder / "memory.current", folder / "memory.usage_in_bytes", default=0)
    stat = _numbers(folder / "memory.stat")
    prefix = "total_" if "total_inactive_file" in stat else ""  # v1 has those of child groups apart, v2 includes them
    return used - stat.get(f"{prefix}active_file", 0) - stat.get(f"{prefix}inactive_file", 0)


def _first_number(*files: Path, default: float) -> float:
    """Of the first file that holds one."""
    for file in files:
        try:
            return int(file.read_text())
        except (OSError, ValueError):  # a group without the controller has no such file, v2 says "max"
            continue
    return default


def _numbers(file: Path) -> dict[str, int]:
    """Of lines "name number", with a unit or not; none if the file cannot be read."""
    try:
        lines = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
