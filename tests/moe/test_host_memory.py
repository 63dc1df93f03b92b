"""Host memory that this process may use: the machine's, or what its cgroups leave of it. Fake cgroup files."""

import os
from pathlib import Path

import pytest

from moe.cpu.memory import free_bytes, usable_bytes
from tests.tables import rows

PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
NO_LIMIT = 9223372036854771712  # of v1
MIB = 1 << 20
V2 = ("31 23 0:28 / {point} rw - cgroup2 cgroup2 rw", "0::/box")
V1 = ("32 31 0:29 / {point} rw - cgroup cgroup rw,memory", "4:memory:/box")


def fake_system(folder: Path, version: tuple[str, str], files: dict[str, str]) -> Path:
    """/proc/self and a cgroup tree with a group named box; `files` by path below the mount point."""
    (folder / "self").mkdir()
    (folder / "self" / "mountinfo").write_text(version[0].format(point=folder / "groups") + "\n")
    (folder / "self" / "cgroup").write_text(version[1] + "\n")
    for name, text in files.items():
        path = folder / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder / "self"


@rows(
    "version, files, limit, free",
    (V2, {}, PHYSICAL, 900 * MIB),
    (V2, {"box/memory.max": "max", "box/memory.current": "5"}, PHYSICAL, 900 * MIB),
    (V2, {"box/memory.max": str(512 * MIB), "box/memory.current": str(100 * MIB)}, 512 * MIB, 412 * MIB),
    (V2, {"memory.max": str(256 * MIB), "box/memory.max": str(512 * MIB)}, 256 * MIB, 256 * MIB),
    (
        V2,
        {
            "box/memory.max": str(512 * MIB), "box/memory.current": str(500 * MIB),
            "box/memory.stat": f"anon 7\nactive_file {100 * MIB}\ninactive_file {200 * MIB}",
        },
        512 * MIB, 312 * MIB,
    ),
    (V2, {"box/memory.max": str(9 * MIB), "box/memory.current": str(10 * MIB)}, 9 * MIB, 0),
    (V1, {"box/memory.limit_in_bytes": str(NO_LIMIT), "box/memory.usage_in_bytes": "5"}, PHYSICAL, 900 * MIB),
    (
        V1,
        {
            "box/memory.limit_in_bytes": str(512 * MIB), "box/memory.usage_in_bytes": str(500 * MIB),
            "box/memory.stat": f"active_file 0\ntotal_active_file {MIB}\ntotal_inactive_file {2 * MIB}",
        },
        512 * MIB, 15 * MIB,
    ),
)  # fmt: skip
def test_the_smaller_of_machine_and_cgroup(
    version: tuple[str, str], files: dict[str, str], limit: int, free: int, tmp_path: Path
) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: {PHYSICAL // 1024} kB\nMemAvailable: {900 * 1024} kB\n")
    proc = fake_system(tmp_path, version, files)
    assert usable_bytes(proc) == limit
    assert free_bytes(proc, tmp_path / "meminfo") == free


def test_without_proc_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_bytes(tmp_path) == PHYSICAL
    assert 0 < free_bytes() <= usable_bytes()
