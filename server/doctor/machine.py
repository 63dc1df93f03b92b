"""`Machine`: where the doctor looks. Everything it learns comes through here, so tests can give it another machine."""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 120.0  # importing packages for the first time, from a cold disk


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended; the status is negative for a signal, and None if it took too long."""

    status: int | None
    out: str
    err: str

    @property
    def words(self) -> str:
        """The first line that it wrote about an error, else the first at all."""
        lines = [line.strip() for line in (self.err + "\n" + self.out).splitlines() if line.strip()]
        if lines:
            return lines[0]
        return "it took too long" if self.status is None else f"it ended with status {self.status}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine's files below `root`, its environment, and the bytes of the file system that holds a folder."""

    environ: Mapping[str, str]
    root: Path = Path("/")
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    total_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).total

    def read(self, path: str) -> str | None:
        """The text of a file below the root, stripped; None if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None

    def find(self, pattern: str) -> list[Path]:
        """Files and folders below the root that match, sorted."""
        return sorted(self.root.glob(pattern))

    def has_program(self, name: str) -> bool:
        """Whether the environment's PATH has a program."""
        return shutil.which(name, path=self.environ.get("PATH", os.defpath)) is not None

    def run(self, program: str, *arguments: str) -> Outcome | None:
        """Run a program of the environment's PATH, or one given with its folder; None if there is none."""
        found = shutil.which(program, path=self.environ.get("PATH", os.defpath))
        if found is None:
            return None
        try:
            done = subprocess.run(
                [found, *arguments],
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=_TIMEOUT_S,
                env=dict(self.environ),
            )
        except subprocess.TimeoutExpired:
            return Outcome(None, "", "")
        except OSError as error:
            return Outcome(1, "", str(error))
        return Outcome(done.returncode, done.stdout, done.stderr)
