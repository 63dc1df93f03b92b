"""How many KV pages requests need, by the kinds of layers of the model. Arithmetic only; who holds which page is
`paging`'s business.

Full layers see every token of a request and keep a page for each `page_size` tokens. Sliding layers see the last
`window` tokens and keep the pages of those, and of the steps in flight. Both kinds take pages from one pool.
"""

from dataclasses import dataclass

_STEPS_IN_FLIGHT = 2  # with overlap, a step is scheduled while the one before runs


@dataclass(frozen=True, kw_only=True, slots=True)
class PageNeeds:
    """Page counts of one model. `window` is None if all layers share their pages; `step_tokens`: the largest step."""

    page_size: int
    window: int | None
    step_tokens: int

    @property
    def num_kinds(self) -> int:
        """Kinds of layers with pages of their own."""
        return 1 if self.window is None else 2

    @property
    def lookahead(self) -> int:
        """Tokens of one request that the steps in flight compute at most."""
        return _STEPS_IN_FLIGHT * self.step_tokens

    def count(self, num_tokens: int) -> int:
        """Pages of the first `num_tokens` tokens in one kind of layer."""
        return -(-num_tokens // self.page_size)

    def first_visible(self, position: int) -> int:
        """Index of the first page that sliding layers need for the token at `position` and those after it."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.page_size

    def while_decoding(self, num_tokens: int) -> int:
        """Pages that a request of `num_tokens` tokens holds at most, of both kinds, when it decodes."""
        return self._both_kinds(num_tokens, _STEPS_IN_FLIGHT)

    def at_most(self, num_tokens: int) -> int:
        """Pages that a request of `num_tokens` tokens holds at most, of both kinds, whatever the steps it comes in."""
        return self._both_kinds(num_tokens, self.lookahead)

    def longest(self, num_pages: int) -> int:
        """Tokens of the longest request that `num_pages` pages hold: the largest number with `at_most` within them."""
        num_full = num_pages
        if self.window is not None:
            num_full = max(num_pages // 2, num_pages - self._pages_across(self.window - 1 + self.lookahead))
        return num_full * self.page_size

    def _both_kinds(self, num_tokens: int, num_in_flight: int) -> int:
        num_full = self.count(num_tokens)
        if self.window is None:
            return num_full
        return num_full + min(num_full, self._pages_across(self.window - 1 + num_in_flight))

    def _pages_across(self, num_tokens: int) -> int:
        """Pages that consecutive tokens touch at most, wherever the first one lies in its page."""
        return (num_tokens - 2) // self.page_size + 2
