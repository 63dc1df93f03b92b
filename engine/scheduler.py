"""Chooses the tokens of every step. Pure policy: no torch, no clock, no sockets.

Rules, in this order:
1. Every running sequence with one pending token gets it (decode); the oldest first.
2. The rest of the token budget is shared evenly between the clients that have prompts; a client spends its share on
   running prompts, then on new ones, the oldest first. `fair_queue` says who is next to run.
3. A sequence is admitted with the pages of all its tokens so far. Its sliding pages (`paging`) are taken chunk by
   chunk; those of its next steps must be there. While others run, enough for each of them must be left, too, so that
   admission does not cause preemption at once. A chunk is cut to the sliding pages that are left.
4. When a decoding sequence, or the oldest one, needs a page and none is left, the youngest of the least urgent running
   ones of whoever runs the most gives all its pages back and waits in front of its connection's younger ones; its
   tokens are computed again later. The oldest of the most urgent is never preempted by another, and one request always
   fits alone (`validate` saw to it), so it always advances: a request waits only for its client's more urgent ones.
5. When the next to run lacks a place or pages, whoever runs at least two requests more than its client, or its
   connection, gives way in the same manner, one request a step: a single question need not wait until long answers
   end. Each such exchange brings the two closer, so it cannot go back and forth.
6. A step may be scheduled while the one before runs. A token that is still being chosen counts as pending (`Sequence`).
   A sequence that is preempted meanwhile is not admitted again before its step is over.
"""

from bisect import insort

from engine.fair_queue import FairQueue, Shares, split_evenly
from engine.page_needs import PageNeeds
from engine.pages import PageAllocator
from engine.paging import Paging
from engine.prefix_cache import PrefixCache
from engine.sequence import Chunk, Sequence

_STEPS_TO_RAISE = 64
_MAX_DESCRIBED = 100


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
        window: int | None = None,
    ) -> None:
        """`window`: tokens that sliding layers see, where those have pages of their own (`KvLayout.window`)."""
        self.pages = pages
        needs = PageNeeds(page_size=page_size, window=window, step_tokens=max_num_batched_tokens)
        self._paging = Paging(pages, cache, needs)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._budget = max_num_batched_tokens  # of the next step; lower for a while after a step without memory
        self._num_steps_to_raise = 0
        self.sequences: dict[str, Sequence] = {}
        self.waiting = FairQueue()
        self.running: list[Sequence] = []  # in order of arrival
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._num_arrivals = 0
        self.newly_started: list[Sequence] = []  # admitted for the first time; the caller notes when, and clears it
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    def add(self, seq: Sequence) -> None:
        """Queue a request. Its id must not be in use."""
        if seq.request_id in self.sequences:
            raise ValueError(f"request id {seq.request_id!r} is in use: ids must be unique among unfinished requests")
        self.sequences[seq.request_id] = seq
        self._num_arrivals += 1
        seq.arrival = self._num_arrivals
        self.waiting.put(seq)

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

    def reset_prefix_cache(self) -> None:
        """Let no request that starts from now on reuse what those before it compute."""
        self._paging.forget_prefixes()

    def schedule(self, max_prompt_tokens: int | None = None) -> list[Chunk]:
        """Chunks of the next step, at most one per sequence; empty when there is nothing to do.

        `max_prompt_tokens` bounds the prompt tokens of a step that also decodes; None: only the token budget does.
        """
        self._raise_budget()
        self._make_way()
        decodes = self._schedule_decodes()
        budget = self._budget - len(decodes)
        if decodes and max_prompt_tokens is not None:
            budget = min(budget, max_prompt_tokens)
        prompts = [seq for seq in self.running if seq not in decodes]
        self._admit_waiting(prompts, budget)
        return [*decodes.values(), *self._schedule_prompts(prompts, budget)]

    def describe(self) -> str:
        """The state in words, a line for each of the first requests. May be called from another thread."""
        lines = [
            f"{len(self.running)} requests run and {len(self.waiting)} wait, {self.pages.num_used} of "
            f"{self.pages.num_pages} pages are in use, {self.num_preemptions} preemptions, "
            f"the next step may have {self._budget} tokens"
        ]
        for seq in list(self.sequences.values())[:_MAX_DESCRIBED]:
            where = "waits" if seq.row < 0 else f"runs in row {seq.row}"
            lines.append(
                f"  {seq.request_id} {where}: {seq.num_prompt} prompt tokens, {seq.num_output} of "
                f"{seq.sampling.max_tokens} generated, {seq.num_computed} computed, {len(seq.pages)} pages, "
                f"{seq.num_in_flight} steps in flight"
            )
        return "\n".join(lines)

    def lower_budget(self, num_tokens: int) -> None:
        """A larger step found no memory. The budget doubles again after every 64 steps."""
        self._budget = num_tokens
        self._num_steps_to_raise = _STEPS_TO_RAISE

    def _raise_budget(self) -> None:
        if self._budget < self.max_num_batched_tokens:
            self._num_steps_to_raise -= 1
            if self._num_steps_to_raise < 0:
                self.lower_budget(min(2 * self._budget, self.max_num_batched_tokens))

    def begin(self, chunk: Chunk) -> None:
        """The step of the chunk is launched: later steps may build on what it computes and on the token it chooses."""
        seq = chunk.seq
        seq.num_computed = chunk.end
        seq.num_promised += chunk.samples
        seq.num_in_flight += 1

    def take_back(self, chunk: Chunk) -> None:
        """The step of the chunk, the last one begun for its sequence, is not run after all."""
        seq = chunk.seq
        seq.num_promised -= chunk.samples
        seq.num_in_flight -= 1
        if seq.row >= 0:
            seq.num_computed = chunk.start

    def commit(self, chunk: Chunk) -> None:
        """The step of the chunk is over and its keys are written: full pages become findable, sliding ones go.

        The caller appends the token, if the chunk was to give one. A sequence that was preempted meanwhile has no pages
        any more. It waits until all its steps are over, so pages that it holds are those of the chunk.
        """
        seq = chunk.seq
        seq.num_promised -= chunk.samples
        seq.num_in_flight -= 1
        if seq.row >= 0:
            self._paging.commit(seq, chunk.end)

    def _make_way(self) -> None:
        """Rule 5, at most one request per step, before chunks are chosen, so that no chosen chunk is lost."""
        if not self.waiting:
            return
        shares = Shares(self.running)
        seq = self.waiting.first(shares)
        if seq.num_in_flight:
            return  # it was preempted a moment ago
        if self.running and not self._fits(seq):
            victim = shares.first_to_give_way(self.running)
            is_more_urgent = victim.client == seq.client and victim.priority < seq.priority
            if shares.excess(victim.path, seq.path) > 1 and not is_more_urgent:  # else it would be the next to run
                self._preempt(victim)

    def _schedule_decodes(self) -> dict[Sequence, Chunk]:
        chunks: dict[Sequence, Chunk] = {}
        for seq in list(self.running):
            while self._needs_page(seq) and not self._paging.grow(seq):
                victim = Shares(self.running).first_to_give_way(self.running)
                self._preempt(victim)  # it may be `seq` itself
                chunks.pop(victim, None)
            if seq.row >= 0 and seq.num_pending == 1 and len(chunks) < self._budget:
                chunks[seq] = Chunk.next_of(seq, 1)
        return chunks

    def _needs_page(self, seq: Sequence) -> bool:
        """Whether others give way if the next token lacks a page. Prompts wait instead, but the oldest must advance.

        It waits, too, for a step of its own that is in flight, since that one gives sliding pages back.
        """
        if seq.row < 0:
            return False
        return seq.num_pending == 1 or (seq is self.running[0] and seq.num_pending > 1 and not seq.num_in_flight)

    def _schedule_prompts(self, prompts: list[Sequence], budget: int) -> list[Chunk]:
        """Chunks of running prompts: clients share the budget evenly, the oldest prompt of each goes first."""
        chunks = []
        for seq, num_granted in _split_among_clients(prompts, budget):
            num_tokens = self._paging.extend(seq, num_granted)
            if num_tokens:
                chunks.append(Chunk.next_of(seq, num_tokens))
        return chunks

    def _admit_waiting(self, prompts: list[Sequence], budget: int) -> None:
        """Admit new prompts while the running ones leave budget, or while a client has no prompt among them."""
        while self.waiting and budget:
            seq = self.waiting.first(Shares(self.running))
            is_client_served = any(prompt.client == seq.client for prompt in prompts)
            if is_client_served and sum(prompt.num_pending for prompt in prompts) >= budget:
                return
            if seq.num_in_flight or not self._admit(seq):
                return
            self.waiting.remove(seq)
            insort(self.running, seq, key=_arrival)
            insort(prompts, seq, key=_arrival)

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._give_back(seq)
        self.waiting.put(seq)
        self.num_preemptions += 1

    def _fits(self, seq: Sequence) -> bool:
        """True if `_admit` would admit the sequence now."""
        return bool(self._free_rows) and self._paging.fits(seq, self.running)

    def _admit(self, seq: Sequence) -> bool:
        if not self._free_rows or not self._paging.admit(seq, self.running):
            return False
        seq.row = self._free_rows.pop()
        if not seq.started:
            seq.started = True
            self.newly_started.append(seq)
            seq.num_cached = seq.num_computed
            self.num_prompt_tokens += seq.num_prompt
            self.num_cached_tokens += seq.num_cached
        return True

    def _give_back(self, seq: Sequence) -> None:
        self._paging.give_back(seq)
        self._free_rows.append(seq.row)
        seq.row = -1


def _split_among_clients(prompts: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """Tokens of each prompt that gets any."""
    demands: dict[str, int] = {}
    for seq in prompts:
        demands[seq.client] = demands.get(seq.client, 0) + seq.num_pending
    granted = split_evenly(demands, budget)
    parts = []
    for seq in prompts:
        num_tokens = min(seq.num_pending, granted[seq.client])
        granted[seq.client] -= num_tokens
        if num_tokens:
            parts.append((seq, num_tokens))
    return parts


def _arrival(seq: Sequence) -> int:
    return seq.arrival
