"""`GrammarCompiler`: grammars to matchers, in threads beside the step loop, with a cache and limits.

    step loop   compile() ............................................. matcher
    thread        └─ in the cache? ── no ─▶ check in a process ─▶ compile here ─┘
    process                                  killed if it takes too long

Nothing is imported or started before the first grammar comes.
"""

import logging
import queue
import re
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeAlias

from engine.bounded_strings import count_characters
from engine.errors import CompilerFailure, GrammarError, GrammarTooSlow
from engine.grammar_check import GrammarChecker, Vocabulary
from engine.grammar_matcher import GrammarMatcher

if TYPE_CHECKING:
    import xgrammar

Compiled: TypeAlias = "Future[xgrammar.CompiledGrammar]"

_PARTS_BYTES = 32 << 20
_ENTRY_BYTES = 1024  # what a cache entry takes beside the grammar
_RETRY_S = 60.0  # what took too long or failed is refused for so long, then tried again
_NUM_THREADS = 2  # one grammar that takes long does not hold up all others
_PLACE = re.compile(r"^(\[[\d:]+\] )?(\S+\.cc:\d+: )?(Check failed: \(.*?\) is (false|true): )?(Invalid .*? error: )?")

logger = logging.getLogger(__name__)


def new_compiler(info: "xgrammar.TokenizerInfo", num_threads: int) -> "xgrammar.GrammarCompiler":
    """A compiler that keeps the masks of parts, such as any string: other grammars have the same parts."""
    import xgrammar

    return xgrammar.GrammarCompiler(info, max_threads=num_threads, cache_limit_bytes=_PARTS_BYTES)


def compile_format(compiler: "xgrammar.GrammarCompiler", format_json: str) -> "xgrammar.CompiledGrammar":
    """Compile one format. Raises GrammarError with xgrammar's reason."""
    try:
        counted = count_characters(format_json)
        return compiler.compile_structural_tag(f'{{"type":"structural_tag","format":{counted}}}')
    except (RuntimeError, ValueError, MemoryError) as error:
        raise GrammarError(reason_of(error)) from error


def reason_of(error: Exception) -> str:
    """What xgrammar says, without where in its source it says so."""
    return _PLACE.sub("", str(error)).strip() or type(error).__name__


class GrammarCompiler:
    """Compiles for one vocabulary and keeps what was used last. Its methods belong to the step loop's thread."""

    def __init__(self, vocabulary: Vocabulary, *, timeout_s: float, cache_bytes: int) -> None:
        """`timeout_s` is for one grammar, waiting for others not included; the cache holds about `cache_bytes`."""
        self.vocabulary = vocabulary
        self._timeout_s = timeout_s
        self._cache_bytes = cache_bytes
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()  # by format, used last at the end; failures, too
        self._sizes: dict[str, int] = {}  # bytes, of those that are done
        self._num_bytes = 0
        self._tasks: queue.SimpleQueue[tuple[str, Compiled]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._num_threads = 0
        self._lock = threading.Lock()
        self._inner: xgrammar.GrammarCompiler | None = None
        self._batch: xgrammar.BatchGrammarMatcher | None = None

    def compile(self, format_json: str) -> Compiled:
        """The compiled format, when it is ready. Equal formats are compiled once.

        Its exception is a GrammarError, or CompilerFailure.
        """
        self._forget_old_failure(format_json)
        known = self._compiled.get(format_json)
        if known is not None:
            self._compiled.move_to_end(format_json)
            return known
        self._forget_oldest()
        future: Compiled = Future()
        self._compiled[format_json] = future
        if not self._num_threads or (self._num_threads < _NUM_THREADS and not self._tasks.empty()):
            self._num_threads += 1
            threading.Thread(target=self._work, name="grammar-compiler", daemon=True).start()
        self._tasks.put((format_json, future))
        return future

    def make_matcher(self, compiled: "xgrammar.CompiledGrammar", param: str | None = None) -> GrammarMatcher:
        """A matcher at the beginning of an answer; `param` is the request field that asked for it."""
        if self._batch is None:
            import xgrammar

            self._batch = xgrammar.BatchGrammarMatcher(self.vocabulary.num_threads)
        return GrammarMatcher(compiled, self._batch, self.vocabulary.eos_ids, param)

    def _forget_old_failure(self, format_json: str) -> None:
        """Forget that a grammar took too long, or that we failed, a while ago: the machine may have been busy."""
        known = self._compiled.get(format_json)
        error = known.exception() if known is not None and known.done() else None
        if isinstance(error, GrammarTooSlow | CompilerFailure) and time.monotonic() - error.raised_s > _RETRY_S:
            self._count_done()
            self._forget(format_json)

    def _forget_oldest(self) -> None:
        """Make room in the cache. Answers that run keep what they use."""
        self._count_done()
        while self._num_bytes > self._cache_bytes:
            oldest = next(iter(self._compiled))
            if oldest not in self._sizes:
                return  # it is being compiled
            self._forget(oldest)

    def _forget(self, format_json: str) -> None:
        del self._compiled[format_json]
        self._num_bytes -= self._sizes.pop(format_json)

    def _count_done(self) -> None:
        while not self._done.empty():
            format_json, num_bytes = self._done.get()
            self._sizes[format_json] = num_bytes
            self._num_bytes += num_bytes

    def _work(self) -> None:
        """Thread body."""
        checker = GrammarChecker(self.vocabulary, self._timeout_s)
        while True:
            format_json, future = self._tasks.get()
            num_bytes = _ENTRY_BYTES + len(format_json)
            try:
                compiled = self._compile(format_json, checker)
            except (GrammarError, CompilerFailure) as error:
                future.set_exception(error)
            except Exception:  # a thread that ends would leave requests waiting for ever
                logger.exception("compiling a grammar failed")
                future.set_exception(CompilerFailure())
            else:
                num_bytes += compiled.memory_size_bytes
                future.set_result(compiled)
            self._done.put((format_json, num_bytes))

    def _compile(self, format_json: str, checker: GrammarChecker) -> "xgrammar.CompiledGrammar":
        checker.start()
        import xgrammar  # which takes as long here as there, so both begin at once

        checker.check(format_json)
        with self._lock:
            if self._inner is None:
                info = xgrammar.TokenizerInfo.deserialize_json(checker.read_tokenizer_info())
                self._inner = new_compiler(info, self.vocabulary.num_threads)
        return compile_format(self._inner, format_json)
