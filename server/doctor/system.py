"""Limits of the system, shared memory, and the folders that the service and its libraries write."""

import os
import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from engine.config import EngineConfig
from engine.units import size_text
from server.doctor.finding import Finding, Level, ok
from server.doctor.machine import Machine
from server.open_files import MORE_FILES

_GIB = 1 << 30
_FEW_FILES, _ENOUGH_FILES = 128, 4096  # each connection takes one, the engine and its libraries some dozens
_SHM_BYTES = 1 * _GIB  # Docker's own 64 MiB are too few for NCCL
_CACHE_BYTES = 1 * _GIB


def compiler(machine: Machine, *, has_gpu: bool) -> Finding:
    """Triton compiles its launcher in C when a kernel is first launched; the service cannot use a GPU without."""
    if not has_gpu:
        return ok("C compiler", "not needed without a GPU")
    way_out = "apt install gcc libc6-dev python3-dev, or what your system calls them"
    asked = machine.environ.get("CC")
    found = next((name for name in ([asked] if asked else ["gcc", "clang"]) if machine.has_program(name)), None)
    if found is None:
        text = f"CC names {asked}, which is not on the PATH" if asked else "neither gcc nor clang is on the PATH"
        return Finding(topic="C compiler", level=Level.PROBLEM, text=f"{text}, and Triton needs one", way_out=way_out)
    headers = sysconfig.get_paths()["include"]
    if machine.read(f"{headers.lstrip('/')}/Python.h") is None:
        text = f"there is no Python.h in {headers}, and Triton needs it"
        return Finding(topic="C compiler", level=Level.PROBLEM, text=text, way_out=way_out)
    return ok("C compiler", f"{found}, and Python's headers")


def open_files(machine: Machine, config: EngineConfig) -> Finding:
    """How many files this process may open, after it has raised the limit as the service does; connections are some."""
    limit = _limit(machine, "Max open files")
    num_requests = config.max_requests * config.data_parallel_size
    if limit is None or limit >= max(_ENOUGH_FILES, num_requests + _FEW_FILES):
        return ok("open files", "no limit is known" if limit is None else f"{limit} may be open")
    level = Level.PROBLEM if limit < _FEW_FILES else Level.WARNING
    text = f"only {limit} may be open, and each connection takes one"
    if limit < num_requests + _FEW_FILES:
        text += f": {num_requests} requests may run and wait at once"
    return Finding(topic="open files", level=level, text=text, way_out=MORE_FILES)


def locked_memory(machine: Machine, config: EngineConfig) -> Finding:
    """Transports register memory with InfiniBand adapters, which counts as locked."""
    limit = _limit(machine, "Max locked memory")
    if limit is None or config.moe_a2a_backend == "none" or config.nnodes == 1:
        return ok("locked memory", "no limit" if limit is None else f"{size_text(limit)}, enough for one host")
    text = f"only {size_text(limit)} may be locked, and InfiniBand needs its buffers locked"
    way_out = "ulimit -l unlimited, LimitMEMLOCK=infinity in systemd, or docker run --ulimit memlock=-1"
    return Finding(topic="locked memory", level=Level.WARNING, text=text, way_out=way_out)


def _limit(machine: Machine, name: str) -> int | None:
    """A soft limit of this process; None if there is none, or it is not known."""
    found = re.search(rf"^{name}\s+(\d+)\s", machine.read("proc/self/limits") or "", re.MULTILINE)
    return None if found is None else int(found[1])


def shared_memory(machine: Machine, config: EngineConfig) -> Finding:
    """NCCL passes tensors between the GPUs of a host through /dev/shm."""
    folder = machine.root / "dev/shm"
    is_needed = len(config.local_ranks) > 1
    way_out = "docker run --shm-size 16g or --ipc=host; in Kubernetes an emptyDir of medium Memory at /dev/shm"
    if not folder.is_dir():
        level = Level.PROBLEM if is_needed else Level.NOTE
        return Finding(topic="shared memory", level=level, text="there is no /dev/shm", way_out=way_out)
    size = machine.total_bytes(folder)
    if size >= _SHM_BYTES or not is_needed:
        return ok("shared memory", f"{size_text(size)} in /dev/shm")
    text = f"{size_text(size)} in /dev/shm are few for {len(config.local_ranks)} ranks"
    return Finding(topic="shared memory", level=Level.WARNING, text=text, way_out=way_out)


def cache_folders(environ: Mapping[str, str], tune_cache: Path | None) -> dict[str, tuple[str, Path]]:
    """The folders that are written, as the libraries choose them: name to the variable that moves it, and the path."""
    home = Path(environ.get("HOME") or "/")
    xdg = environ.get("XDG_CACHE_HOME", "")
    caches = Path(xdg) if os.path.isabs(xdg) else home / ".cache"
    hub = Path(environ.get("HF_HOME") or caches / "huggingface")
    folders = {
        "cache of Triton": (
            "TRITON_CACHE_DIR",
            Path(environ.get("TRITON_CACHE_DIR") or Path(environ.get("TRITON_HOME") or home) / ".triton" / "cache"),
        ),
        "cache of FlashInfer": (
            "FLASHINFER_WORKSPACE_BASE",
            Path(environ.get("FLASHINFER_WORKSPACE_BASE") or home) / ".cache" / "flashinfer",
        ),
        "cache of the hub": ("HF_HUB_CACHE", Path(environ.get("HF_HUB_CACHE") or hub / "hub")),
    }
    if tune_cache is not None:
        folders["cache of --tune"] = ("--tune-cache-dir", tune_cache)
    return folders


def cache_findings(
    machine: Machine, tune_cache: Path | None, *, has_gpu: bool, downloads: bool, tunes: bool
) -> list[Finding]:
    """Whether each folder can be written and has room. One that this start needs is a problem if it cannot.

    has_gpu: kernels are compiled. downloads: the model is on the hub. tunes: results are to be kept.
    """
    needed = {"cache of Triton": has_gpu, "cache of the hub": downloads, "cache of --tune": tunes}
    findings = []
    for name, (variable, folder) in cache_folders(machine.environ, tune_cache).items():
        nearest = _nearest_folder(machine.root / str(folder).lstrip("/"))
        way_out = f"point {variable} to a folder that can be written, or in a container mount a volume there"
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            level = Level.PROBLEM if needed.get(name) else Level.WARNING
            findings.append(Finding(topic=name, level=level, text=f"{folder} cannot be written", way_out=way_out))
            continue
        free = machine.free_bytes(nearest)
        if free < _CACHE_BYTES:
            text = f"only {size_text(free)} are free at {folder}"
            way_out = f"free some, or point {variable} to a larger disk"
            findings.append(Finding(topic=name, level=Level.WARNING, text=text, way_out=way_out))
        else:
            findings.append(ok(name, f"{size_text(free)} free at {folder}"))
    return findings


def _nearest_folder(path: Path) -> Path:
    """The path, or the first of its parents that exists: the one in which the rest would be made."""
    return path if path.exists() or path == path.parent else _nearest_folder(path.parent)
