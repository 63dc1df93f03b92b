"""`GrammarMatcher`: where one answer stands in its grammar; `fill_masks` asks many of them which tokens may come next.

xgrammar is imported by the first grammar that is compiled, never before.
"""

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import GrammarError, GrammarTooSlow

if TYPE_CHECKING:
    import xgrammar

_MOST_S = 0.05  # of CPU time for one token; a grammar that needs more would hold up the others at every step


class GrammarMatcher:
    """Follows the tokens of one answer. Chunked prefill and preemption do not concern it: a token counts once."""

    def __init__(
        self,
        compiled: "xgrammar.CompiledGrammar",
        batch: "xgrammar.BatchGrammarMatcher",
        eos_ids: frozenset[int],
        param: str | None = None,
    ) -> None:
        """`batch` fills the masks of all matchers that share it; `eos_ids` are those that `compiled` ends with.

        `param` is the request field that asked for the grammar.
        """
        import xgrammar

        self.eos_ids = eos_ids
        self.batch = batch
        self.param = param
        self.is_too_slow = False
        self.inner = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=not eos_ids)

    def accept(self, token_id: int) -> None:
        """The answer goes on with this token. Raises GrammarError if the grammar forbids it, or takes too much time."""
        start_s = time.thread_time()
        if not self.inner.accept_token(token_id):
            raise GrammarError(f"it forbids the token {token_id} that was chosen")
        if self.is_too_slow or time.thread_time() - start_s > _MOST_S:
            raise GrammarTooSlow(f"following it takes longer than {1000 * _MOST_S:g} ms a token; make it simpler")

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return bool(self.inner.is_completed())

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow: the answer has ended with a token of the grammar's own."""
        return bool(self.inner.is_terminated())


def fill_masks(matchers: list[GrammarMatcher], words_EN: np.ndarray) -> None:
    """Write which tokens may follow in each grammar to the first rows of `words_EN`: a bit for each token, int32.

    At least one matcher; all have the same vocabulary. xgrammar may use several threads.
    """
    inner: list[Any] = [matcher.inner for matcher in matchers]
    start_s = time.monotonic()
    matchers[0].batch.batch_fill_next_token_bitmask(inner, words_EN)
    if time.monotonic() - start_s > _MOST_S:  # one of them may be to blame, or the machine was busy
        for row, matcher in enumerate(matchers):
            start_s = time.thread_time()
            matcher.inner.fill_next_token_bitmask(words_EN, row)
            matcher.is_too_slow = time.thread_time() - start_s > _MOST_S
