"""G09: as many threads as the affinity mask and the cgroup's CPU quota allow, whichever is less. Fake cgroup files."""

import math
import os
from pathlib import Path

import pytest

from moe.cpu.threads import cgroup_quota, usable_cpus
from tests.tables import rows

V2 = "31 23 0:28 {root} {point} rw,relatime - cgroup2 cgroup2 rw"
V1 = "32 31 0:29 {root} {point} rw,relatime - cgroup cgroup rw,cpu,cpuacct"
OTHERS = "24 1 0:20 / / rw - ext4 /dev/vda rw\n33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def fake_system(folder: Path, mount: str, own_groups: str, limits: dict[str, str], root: str = "/") -> Path:
    """/proc/self and one mounted cgroup tree; `limits` are CPUs by group below the mount point."""
    proc, point = folder / "proc", folder / "cgroup"
    proc.mkdir()
    (proc / "mountinfo").write_text(OTHERS + mount.format(root=root, point=point) + "\n")
    (proc / "cgroup").write_text(own_groups + "\n")
    for group, limit in limits.items():
        (point / group).mkdir(parents=True, exist_ok=True)
        quota, period = limit.split()
        files = {"max": limit} if mount is V2 else {"cfs_quota_us": quota, "cfs_period_us": period}
        for name, text in files.items():
            (point / group / f"cpu.{name}").write_text(text + "\n")
    return proc


CASES = {
    "v2, docker run --cpus 4": (V2, "0::/", {"": "400000 100000"}, "/", 4.0),
    "v2, no limit": (V2, "0::/", {"": "max 100000"}, "/", math.inf),
    "v2, half a CPU": (V2, "0::/", {"": "50000 100000"}, "/", 0.5),
    "v2, the outer group is tighter": (
        V2, "0::/pod/box", {"pod": "200000 100000", "pod/box": "800000 100000"}, "/", 2.0,
    ),
    "v2, only the inner group has the controller": (V2, "0::/a/b", {"a/b": "150000 50000"}, "/", 3.0),
    "v2, a group outside the container": (V2, "0::/../other", {"": "100000 100000"}, "/", 1.0),
    "v2, another group's limit": (V2, "0::/a", {"b": "100000 100000"}, "/", math.inf),
    "v1, docker run --cpus 4": (
        V1, "4:cpu,cpuacct:/docker/box\n3:memory:/", {"": "400000 100000"}, "/docker/box", 4.0,
    ),
    "v1, no limit": (V1, "4:cpu,cpuacct:/", {"": "-1 100000"}, "/", math.inf),
    "v1, nested": (V1, "4:cpu,cpuacct:/a/b", {"": "-1 100000", "a": "300000 100000", "a/b": "-1 100000"}, "/", 3.0),
    "v1, a path of the host": (V1, "4:cpu,cpuacct:/docker/box", {"": "200000 100000"}, "/elsewhere", 2.0),
    "v1, without the controller": (V1, "3:memory:/", {"": "100000 100000"}, "/", math.inf),
    "broken numbers": (V2, "0::/", {"": "many 0"}, "/", math.inf),
}  # fmt: skip


@rows("case", *CASES)
def test_g09_quota(case: str, tmp_path: Path) -> None:
    mount, own_groups, limits, root, quota = CASES[case]
    assert cgroup_quota(fake_system(tmp_path, mount, own_groups, limits, root)) == quota


@rows(
    "num_cores, limit, usable",
    (64, "400000 100000", 4), (2, "400000 100000", 2), (64, "max 100000", 64), (64, "250000 100000", 2),
     (64, "50000 100000", 1),
)  # fmt: skip
def test_g09_the_smaller_of_mask_and_quota_in_whole_cpus(
    num_cores: int, limit: str, usable: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    assert usable_cpus(fake_system(tmp_path, V2, "0::/", {"": limit})) == usable


def test_g09_without_proc_the_mask_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5, 9})
    assert usable_cpus(tmp_path) == 3
