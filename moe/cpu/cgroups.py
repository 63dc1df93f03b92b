"""The cgroups that limit this process, v1 and v2: in which folders their limits stand."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PROC = Path("/proc/self")


def group_folders(controller: str, proc: Path = PROC) -> Iterator[Path]:
    """Folders of this process's group and its parents that can hold limits of a controller, such as "cpu" or "memory".

    `proc` is the folder of this process in /proc. A group without the controller has a folder all the same.
    """
    for mount in _mounts(proc, controller):
        yield from _folders(mount)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mount:
    """A mounted cgroup tree. `root` is the group that appears at `point`, `group` the one this process is in."""

    point: Path
    root: PurePosixPath
    group: PurePosixPath


def _mounts(proc: Path, controller: str) -> Iterator[_Mount]:
    """The cgroup trees that can hold the limits: v2's single tree and v1's tree of the controller."""
    try:
        groups = _groups((proc / "cgroup").read_text())
        lines = (proc / "mountinfo").read_text().splitlines()
    except OSError:  # not Linux, or a sandbox without /proc
        return
    for line in lines:
        # Fields: three numbers, root, mount point, more; after the dash the type, the source and the tree's options.
        before, _, after = line.partition(" - ")
        fields, (kind, *_, options) = before.split(), after.split()
        name = "" if kind == "cgroup2" else controller
        if (kind == "cgroup2" or (kind == "cgroup" and controller in options.split(","))) and name in groups:
            yield _Mount(point=Path(fields[4]), root=PurePosixPath(fields[3]), group=groups[name])


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
