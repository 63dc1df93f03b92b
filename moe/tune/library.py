"""Runs the autotuner of libraries that choose their own tactics: FlashInfer's TRT-LLM kernels and CuTe-DSL v2.

In one call the library measures every bucket of token counts up to the largest. Our time budget does not apply. Each
rank tunes alone, because these kernels do not communicate. A separate file keeps the results for later starts.
"""

import logging
import time
from pathlib import Path

from moe.formats import ExpertWeights
from moe.group import Group
from moe.registry import load_backend
from moe.runner import MoeRunner
from moe.topology import Topology
from moe.tune.cache import TuneKey
from moe.tune.measure import Measurer
from moe.types import MoeQuantInfo

logger = logging.getLogger(__name__)


class LibraryTuner:
    """Tunes the layers of one process, once per shape, and reads the file once. Call `should_autotune` first."""

    def __init__(self, folder: Path | None, ranks: Group) -> None:
        """`folder` holds the library's file; None stores nothing."""
        self._file = None if folder is None else folder / f"flashinfer-rank{ranks.rank}.json"
        self._tuned: set[TuneKey] = set()
        self._is_read = False

    def tune(
        self, key: TuneKey, runner: MoeRunner, info: MoeQuantInfo, experts: ExpertWeights, topology: Topology
    ) -> bool:
        """Tune the layer of `key` up to its largest token count; False if the library does not tune itself."""
        context = load_backend(runner.backend).library_tuning(info)
        if context is None:
            return False
        if key not in self._tuned:
            start = time.monotonic()
            with context(self._make_room(), measure=True):
                Measurer(runner, info, experts, topology).run_as_served(max(key.token_counts))
            self._tuned.add(key)
            logger.info("%s tuned itself for %s experts of %d x %d in %.1f s", runner.backend, experts.format_name,
                        experts.hidden_size, experts.intermediate_size, time.monotonic() - start)  # fmt: skip
        return True

    def read_kept(self, runner: MoeRunner, info: MoeQuantInfo) -> None:
        """Load the library's results of an earlier start. Measures nothing."""
        if self._is_read or self._file is None or not self._file.is_file():
            return
        context = load_backend(runner.backend).library_tuning(info)
        if context is not None:
            with context(self._file, measure=False):
                self._is_read = True

    def _make_room(self) -> Path | None:
        """Make the folder and return the file's path; None, with a warning, if that fails."""
        if self._file is not None:
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                logger.warning("the library's tactics are not kept: %s", error)
                self._file = None
        return self._file
