"""`StepProfile`: records the steps of one engine process with torch's profiler, into a trace for Chrome or Perfetto."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import OrderError

if TYPE_CHECKING:
    from torch.profiler import profile


class StepProfile:
    """Belongs to the step loop's thread, since torch records the thread that starts it."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        """`folder` is where traces go, None if there shall be none."""
        self._folder = folder
        self._rank = rank
        self._profile: profile | None = None

    def start(self) -> None:
        """Begin to record. Raises OrderError if there is no folder, or one is being recorded."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        if self._folder is None:
            raise OrderError("there is no folder for profiles: start the service with --profile-dir")
        if self._profile is not None:
            raise OrderError("a profile is being recorded: stop it first")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OrderError(f"profile_dir {self._folder} cannot be made: {error.strerror}") from error
        devices = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *devices])
        self._profile.start()

    def stop(self) -> None:
        """Write what was recorded. Raises OrderError if nothing is, or the file cannot be written."""
        if self._folder is None or self._profile is None:
            raise OrderError("no profile is being recorded: start one first")
        recorded, self._profile = self._profile, None
        recorded.stop()
        file = self._folder / f"{time.strftime('%Y%m%d-%H%M%S')}-rank{self._rank}.pt.trace.json.gz"
        try:
            recorded.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:
            raise OrderError(f"the profile cannot be written to {file}: {error}") from error
