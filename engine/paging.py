"""`Paging`: takes KV pages for requests and gives them back, for full layers and sliding ones. Policy on numbers only.

    position           0 ....... first visible ....... num_computed ....... end of the step ....... last known token
    seq.pages          [..][..][..][..][..][..][..][..][..][..][..][..][..][..][..][..][..][..][..][..][..][..][..]
    seq.sliding_pages  gone gone gone [..][..][..][..][..][..][..][..][..][..]  taken with the chunk that needs them

A sliding page goes when a step is collected and its next token sees nothing of the page. Steps that are already
launched begin at that token or later, so none of them reads the page.

A prefix can be reused if its full pages are all cached, and the sliding pages that its next token sees are, too.
"""

from collections.abc import Sequence as ListLike

from engine.page_needs import PageNeeds
from engine.pages import PageAllocator
from engine.prefix_cache import PrefixCache, extend_keys
from engine.sequence import NO_PAGE, Sequence


class Paging:
    """Pages of running sequences, all out of one pool. A model without sliding layers leaves `sliding_pages` empty."""

    def __init__(self, pages: PageAllocator, cache: PrefixCache | None, needs: PageNeeds) -> None:
        self._pages = pages
        self._cache = cache
        self._needs = needs
        self._page_size = needs.page_size
        self._is_sliding = needs.window is not None

    def admit(self, seq: Sequence, running: ListLike[Sequence]) -> bool:
        """Give the sequence full pages for all its tokens, cached ones as far as there are; False if too few are left.

        Enough must be left for the sliding pages of its next steps and of those of the running sequences, and for one
        more page of each kind for each running sequence, so that admission does not cause preemption at once.
        """
        matched = self._hold_cached(seq, running)
        if matched is None:
            return False
        full, sliding = matched
        num_matched = len(full)
        seq.pages = full + self._pages.allocate(self._needs.count(len(seq.token_ids)) - num_matched)
        seq.num_slid_pages = num_matched - len(sliding) if self._is_sliding else 0
        seq.sliding_pages = [NO_PAGE] * seq.num_slid_pages + sliding
        seq.num_computed = num_matched * self._page_size
        seq.num_remembered_pages = num_matched
        seq.cache_epoch = 0 if self._cache is None else self._cache.epoch
        seq.num_sent_pages = 0
        seq.num_sent_sliding_pages = seq.num_slid_pages
        return True

    def fits(self, seq: Sequence, running: ListLike[Sequence]) -> bool:
        """True if `admit` would admit the sequence now."""
        matched = self._hold_cached(seq, running)
        if matched is not None:
            self._release(*matched)
        return matched is not None

    def grow(self, seq: Sequence) -> bool:
        """Give the next token of a running sequence its pages; False if none is left."""
        for table in (seq.pages, seq.sliding_pages) if self._is_sliding else (seq.pages,):
            if len(table) * self._page_size <= seq.num_computed:
                if not self._pages.num_available:
                    return False
                table.extend(self._pages.allocate(1))
        return True

    def extend(self, seq: Sequence, num_tokens: int) -> int:
        """Take the sliding pages of the next `num_tokens` tokens of a prompt; returns for how many they suffice."""
        if not self._is_sliding:
            return num_tokens
        num_missing = self._needs.count(seq.num_computed + num_tokens) - len(seq.sliding_pages)
        seq.sliding_pages += self._pages.allocate(max(0, min(num_missing, self._pages.num_available)))
        return min(num_tokens, len(seq.sliding_pages) * self._page_size - seq.num_computed)

    def commit(self, seq: Sequence, num_written: int) -> None:
        """The keys of the first `num_written` tokens are written: full pages become findable, unseen ones go.

        A request that was admitted before the prefixes were forgotten makes nothing findable: the first of its pages,
        without which the later ones are of no use, are from before.
        """
        cache, num_full = self._cache, num_written // self._page_size
        if cache is not None and num_full > seq.num_remembered_pages and seq.cache_epoch == cache.epoch:
            self._remember(cache, seq, num_full)
        if not self._is_sliding:
            return
        first, gone = self._needs.first_visible(num_written), seq.num_slid_pages
        if first > gone:
            self._pages.release(seq.sliding_pages[gone:first])
            seq.sliding_pages[gone:first] = [NO_PAGE] * (first - gone)
            seq.num_slid_pages = first

    def give_back(self, seq: Sequence) -> None:
        """Give back all pages of the sequence."""
        self._release(seq.pages, seq.sliding_pages[seq.num_slid_pages :])
        seq.pages, seq.sliding_pages = [], []
        seq.num_computed = 0
        seq.num_remembered_pages = 0
        seq.num_slid_pages = 0

    def forget_prefixes(self) -> None:
        """Let no request reuse what the requests so far compute; those that run keep their pages."""
        if self._cache is not None:
            self._cache.clear()

    def _hold_cached(self, seq: Sequence, running: ListLike[Sequence]) -> tuple[list[int], list[int]] | None:
        """Hold the cached pages of the beginning, full and sliding; None if too few are left for `admit`."""
        full, sliding = self._match(seq)
        num_needed = self._needs.count(len(seq.token_ids)) - len(full) + self._needs.num_kinds * len(running)
        if self._is_sliding:
            num_needed += self._num_sliding_ahead(seq, len(full) * self._page_size, len(full))
            num_needed += sum(self._num_sliding_ahead(s, s.num_computed, len(s.sliding_pages)) for s in running)
        if num_needed > self._pages.num_available:
            self._release(full, sliding)
            return None
        return full, sliding

    def _num_sliding_ahead(self, seq: Sequence, num_computed: int, num_had: int) -> int:
        """Sliding pages that the next steps of the sequence will take if they bring as much of it as they can."""
        return max(0, self._needs.count(min(len(seq.token_ids), num_computed + self._needs.lookahead)) - num_had)

    def _match(self, seq: Sequence) -> tuple[list[int], list[int]]:
        """Cached pages of the beginning; at least one token stays to be computed, since its logits are wanted."""
        if self._cache is None or seq.wants_prompt_logprobs:  # those need the logits of every prompt token
            return [], []
        num_pages = (len(seq.token_ids) - 1) // self._page_size
        extend_keys(seq.page_keys, seq.token_ids, self._page_size, num_pages, seq.root_key)
        full = self._cache.match(seq.page_keys[:num_pages])
        if not self._is_sliding:
            return full, []
        first, end = self._visible_run(self._cache, seq.page_keys, len(full))
        self._release(full[end:])
        return full[:end], self._cache.match([_sliding_key(key) for key in seq.page_keys[first:end]])

    def _visible_run(self, cache: PrefixCache, keys: list[bytes], end: int) -> tuple[int, int]:
        """The longest prefix of at most `end` pages of which all sliding pages are cached that its next token sees.

        Returns the index of the first of those pages and the end of the prefix.
        """
        while True:
            first = self._needs.first_visible(end * self._page_size)
            missing = next((index for index in range(first, end) if _sliding_key(keys[index]) not in cache), None)
            if missing is None:
                return first, end
            end = missing  # a prefix that ends between `missing` and `end` needs the missing page, too

    def _remember(self, cache: PrefixCache, seq: Sequence, num_full: int) -> None:
        extend_keys(seq.page_keys, seq.token_ids, self._page_size, num_full, seq.root_key)
        for index in range(seq.num_remembered_pages, num_full):
            cache.remember(seq.page_keys[index], seq.pages[index])
            if self._is_sliding:
                cache.remember(_sliding_key(seq.page_keys[index]), seq.sliding_pages[index])
        seq.num_remembered_pages = num_full

    def _release(self, *tables: list[int]) -> None:
        for pages in tables:
            self._pages.release(reversed(pages))  # the end of a prefix is the first to be reused


def _sliding_key(key: bytes) -> bytes:
    """Key of the sliding page beside the full page with this key."""
    return b"sliding" + key
