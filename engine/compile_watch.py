"""`CompileWatch`: counts kernels that are compiled after the service is ready, when a request waits for each of them.

Triton reports every kernel that it compiles or loads from its cache on disk: both mean that the warm-up missed a
kernel. Libraries such as FlashInfer build theirs by running ninja or a compiler. A library that starts its compiler
from C++ code, as DeepGEMM may, is not seen.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

_COMPILERS = ("nvcc", "hipcc", "c++", "g++", "clang++")

logger = logging.getLogger(__name__)


class CompileWatch:
    """Counts from `begin` on. Compilers run in any thread of this process; none of its children are watched."""

    def __init__(self) -> None:
        self.count = 0
        self._is_on = False
        self._others: Any = None  # the listener that was there before

    def begin(self) -> None:
        """Watch Triton, if it has been imported, and the programs that this process starts."""
        self._is_on = True
        sys.addaudithook(self._on_event)
        knobs = sys.modules.get("triton.knobs")
        if knobs is not None:
            self._others = knobs.compilation.listener
            knobs.compilation.listener = self._on_kernel

    def end(self) -> None:
        """Count no more; what others have hooked into Triton stays."""
        self._is_on = False
        knobs = sys.modules.get("triton.knobs")
        if knobs is not None and knobs.compilation.listener == self._on_kernel:
            knobs.compilation.listener = self._others

    def _on_kernel(self, *, src: Any, cache_hit: bool, **rest: Any) -> None:
        """Triton's compilation listener."""
        how = "loaded from Triton's cache" if cache_hit else "compiled"
        self._add(f"Triton kernel {getattr(src, 'name', src)} was {how}")
        if self._others is not None:
            self._others(src=src, cache_hit=cache_hit, **rest)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Python's audit hook: called for every event of the interpreter, so it must be quick and raise nothing."""
        if event == "subprocess.Popen" and self._is_on:
            command = arguments[1]
            if isinstance(command, list | tuple) and command and is_build([str(word) for word in command]):
                self._add(f"a library ran {PurePath(str(command[0])).name}")

    def _add(self, what: str) -> None:
        if self._is_on:
            self.count += 1
            logger.warning("%s after the service was ready: a request waited for it", what)


def is_build(command: Sequence[str]) -> bool:
    """Whether a command builds a library; asking a compiler for its version does not."""
    program = PurePath(command[0]).name
    if program == "ninja":
        return "--version" not in command
    return program in _COMPILERS and "-o" in command
