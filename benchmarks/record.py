"""What every measurement notes about where it ran, and how it is written down."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, object]:
    """Command, commit, hardware and versions of this run."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "commit": commit.stdout.strip() + ("+changes" if dirty.stdout.strip() else ""),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def write(name: str, content: dict[str, object], folder: Path = RESULTS) -> Path:
    """Write `folder/name.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
