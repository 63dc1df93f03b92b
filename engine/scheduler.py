"""Chooses the tokens of every step. Pure policy: no torch, no clock, no sockets.

Rules, in this order:
1. Every running sequence with one pending token gets it (decode); the oldest first.
2. What is left of the token budget goes to running prompts, then to new ones, first come, first served.
3. A sequence is admitted with the pages of all its tokens so far, so a prompt never stops half-way for want of pages;
   while others run, one more page for each of them must be left, so that admission does not cause preemption at once.
4. When a decoding sequence needs a page and none is left, the youngest running one gives all its pages back and
   waits at the head of the queue; its tokens are computed again later. The oldest is never preempted by another, and
   one request always fits alone (`validate` saw to it), so it always advances: nobody starves.
"""

from collections import deque

from engine.pages import PageAllocator
from engine.prefix_cache import PrefixCache, extend_keys
from engine.sequence import Chunk, Sequence


class Scheduler:
    """`sequences` holds every request between `add` and `remove`; each is in exactly one of `waiting` and `running`."""

    def __init__(
        self,
        pages: PageAllocator,
        cache: PrefixCache | None,
        *,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.pages = pages
        self.cache = cache
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.sequences: dict[str, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    def add(self, seq: Sequence) -> None:
        """Queue a request. Its id must not be in use."""
        if seq.request_id in self.sequences:
            raise ValueError(f"request id {seq.request_id!r} is in use: ids must be unique among unfinished requests")
        self.sequences[seq.request_id] = seq
        self.waiting.append(seq)

    def remove(self, request_id: str) -> Sequence | None:
        """Drop a request for whatever reason and free all it holds; None if it is not here (any more)."""
        seq = self.sequences.pop(request_id, None)
        if seq is None:
            return None
        if seq.row >= 0:
            self.running.remove(seq)
            self._give_back(seq)
        else:
            self.waiting.remove(seq)
        return seq

    def schedule(self) -> list[Chunk]:
        """Chunks of the next step, at most one a sequence; empty when there is nothing to do."""
        chunks = self._schedule_decodes()
        budget = self.max_num_batched_tokens - len(chunks)
        for seq in self.running:
            if budget == 0:
                return chunks
            if seq.num_pending > 1:
                chunks.append(Chunk(seq, seq.num_computed, min(seq.num_pending, budget)))
                budget -= chunks[-1].num_tokens
        while self.waiting and budget and len(self.running) < self.max_num_seqs and self._admit(self.waiting[0]):
            seq = self.waiting.popleft()
            self.running.append(seq)
            chunks.append(Chunk(seq, seq.num_computed, min(seq.num_pending, budget)))
            budget -= chunks[-1].num_tokens
        return chunks

    def commit(self, chunk: Chunk) -> None:
        """The keys of the chunk are written: its sequence advances and its full pages become findable."""
        seq = chunk.seq
        seq.num_computed = chunk.end
        num_full = chunk.end // self.page_size
        if self.cache is not None and num_full > seq.num_remembered_pages:
            extend_keys(seq.page_keys, seq.token_ids, self.page_size, num_full)
            for index in range(seq.num_remembered_pages, num_full):
                self.cache.remember(seq.page_keys[index], seq.pages[index])
            seq.num_remembered_pages = num_full

    def _schedule_decodes(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        index = 0
        while index < len(self.running):  # preemption shortens the list from its end
            seq = self.running[index]
            if seq.num_pending == 1 and self._ensure_room(seq):
                chunks.append(Chunk(seq, seq.num_computed, 1))
            index += 1
        return chunks

    def _ensure_room(self, seq: Sequence) -> bool:
        """A page for the next token; False if the sequence had to give way itself."""
        while len(seq.pages) * self.page_size <= seq.num_computed:
            if self.pages.num_available:
                seq.pages += self.pages.allocate(1)
                continue
            victim = self.running.pop()
            self._give_back(victim)
            self.waiting.appendleft(victim)
            self.num_preemptions += 1
            if victim is seq:
                return False
        return True

    def _admit(self, seq: Sequence) -> bool:
        num_tokens = len(seq.token_ids)
        matched = self._match(seq, num_tokens)
        num_new = -(-num_tokens // self.page_size) - len(matched)
        if num_new + len(self.running) > self.pages.num_available:
            self.pages.release(reversed(matched))
            return False
        seq.pages = matched + self.pages.allocate(num_new)
        seq.num_computed = len(matched) * self.page_size
        seq.num_remembered_pages = len(matched)
        seq.row = self._free_rows.pop()
        seq.num_table_pages = 0
        if not seq.started:
            seq.started = True
            seq.num_cached = seq.num_computed
            self.num_prompt_tokens += seq.num_prompt
            self.num_cached_tokens += seq.num_cached
        return True

    def _match(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Cached pages of the beginning; at least one token stays to be computed, since its logits are wanted."""
        if self.cache is None or seq.wants_prompt_logprobs:  # those need the logits of every prompt token
            return []
        num_pages = (num_tokens - 1) // self.page_size
        extend_keys(seq.page_keys, seq.token_ids, self.page_size, num_pages)
        return self.cache.match(seq.page_keys[:num_pages])

    def _give_back(self, seq: Sequence) -> None:
        self.pages.release(reversed(seq.pages))  # the end of a prefix is the first to be reused
        seq.pages = []
        seq.num_computed = 0
        seq.num_remembered_pages = 0
        self._free_rows.append(seq.row)
        seq.row = -1
