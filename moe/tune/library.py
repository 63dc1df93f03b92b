"""Runs the autotuner of libraries that choose their own tactics: FlashInfer's TRT-LLM kernels and CuTe-DSL v2.

In one call the library measures every bucket of token counts up to the largest. Our time budget does not apply. Each
rank tunes alone, because these kernels do not communicate. A separate file keeps the results for later starts.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from moe.backend import LibraryTuning
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
    """Tunes the layers of one process, once per shape, and reads the file once. Call `should_autotune` first.

    A file that cannot be read or written gives one warning, not an error, and is left alone from then on.
    """

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
            self._make_room()
            with self._opened(context, measure=True):
                Measurer(runner, info, experts, topology).run_as_served(max(key.token_counts))
            self._tuned.add(key)
            logger.info("%s tuned itself for %s experts of %d x %d in %.1f s", runner.backend, experts.format_name,
                        experts.hidden_size, experts.intermediate_size, time.monotonic() - start)  # fmt: skip
        return True

    def read_kept(self, runner: MoeRunner, info: MoeQuantInfo) -> None:
        """Load the library's results of an earlier start. Measures nothing."""
        if self._is_read or self._file is None or not os.path.isfile(self._file):
            return
        context = load_backend(runner.backend).library_tuning(info)
        if context is not None:
            self._is_read = True
            with self._opened(context, measure=False):
                pass

    @contextlib.contextmanager
    def _opened(self, context: LibraryTuning, *, measure: bool) -> Iterator[None]:
        """The library's context with our file, or without it if it cannot be read. Errors inside are not caught."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(context(self._file, measure=measure))
            except Exception as error:  # the library takes whatever is JSON for its own
                if self._file is None:
                    raise
                logger.warning("not all tuned tactics are used: %s cannot be read (%s); delete it", self._file, error)
                self._file = None
                stack.enter_context(context(None, measure=measure))
            yield
            try:
                stack.close()
            except Exception as error:
                if self._file is None:
                    raise
                self._warn_not_kept(error)

    def _make_room(self) -> None:
        if self._file is not None:
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                self._warn_not_kept(error)

    def _warn_not_kept(self, error: Exception) -> None:
        logger.warning("tuned tactics are not kept: %s cannot be written (%s)", self._file, error)
        self._file = None
