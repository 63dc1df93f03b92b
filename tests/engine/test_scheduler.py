"""The scheduler's rules one by one, then random sequences of submit, abort, stop and step."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from msgspec.structs import replace

from engine.pages import PageAllocator
from engine.prefix_cache import PrefixCache
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from tests.engine.requests import request


def make_scheduler(num_pages=16, page_size=4, max_num_seqs=4, budget=8, caching=False):
    pages = PageAllocator(num_pages)
    cache = PrefixCache(pages) if caching else None
    return Scheduler(pages, cache, page_size=page_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)


def add(scheduler, name, prompt, max_tokens=100, path=("", ""), **sampling):
    client, connection = path
    asked = replace(request(name, prompt, max_tokens, **sampling), client=client, connection=connection)
    seq = Sequence(asked, stop_ids=frozenset(), seed=0)
    scheduler.add(seq)
    return seq


def step(scheduler, token=1):
    """What the engine does with a schedule: (id, start, tokens) of each chunk."""
    chunks = scheduler.schedule()
    for chunk in chunks:
        scheduler.begin(chunk)
        scheduler.commit(chunk)
        if chunk.samples:
            chunk.seq.token_ids.append(token)
    return [(chunk.seq.request_id, chunk.start, chunk.num_tokens) for chunk in chunks]


def test_a_long_prompt_is_cut_into_chunks_then_decodes():
    scheduler = make_scheduler()
    add(scheduler, "a", range(18))
    assert [step(scheduler) for _ in range(5)] == [
        [("a", 0, 8)], [("a", 8, 8)], [("a", 16, 2)], [("a", 18, 1)], [("a", 19, 1)],
    ]  # fmt: skip


def test_decodes_come_first_and_prompts_fill_the_budget_in_order_of_arrival():
    scheduler = make_scheduler()
    add(scheduler, "a", [1])
    step(scheduler)
    add(scheduler, "b", range(10))
    add(scheduler, "c", range(10))
    assert step(scheduler) == [("a", 1, 1), ("b", 0, 7)]
    assert step(scheduler) == [("a", 2, 1), ("b", 7, 3), ("c", 0, 4)]
    assert step(scheduler) == [("a", 3, 1), ("b", 10, 1), ("c", 4, 6)]


def test_prompts_are_bounded_only_beside_decodes_g84():
    scheduler = make_scheduler(num_pages=64, budget=64)
    add(scheduler, "a", range(40))
    [chunk] = scheduler.schedule(max_prompt_tokens=10)
    assert chunk.num_tokens == 40
    scheduler.begin(chunk)
    scheduler.commit(chunk)
    chunk.seq.token_ids.append(1)
    add(scheduler, "b", range(40))
    assert [chunk.num_tokens for chunk in scheduler.schedule(max_prompt_tokens=10)] == [1, 10]


def test_no_more_sequences_run_than_allowed():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, [1])
    assert [name for name, _, _ in step(scheduler)] == ["a", "b"]
    scheduler.remove("a")
    assert [name for name, _, _ in step(scheduler)] == ["b", "c"]


def test_a_waiting_request_without_room_holds_up_those_behind_it():
    scheduler = make_scheduler(num_pages=4, budget=64)
    add(scheduler, "a", range(8))
    add(scheduler, "big", range(12))
    add(scheduler, "small", [1])
    assert [name for name, _, _ in step(scheduler)] == ["a"]
    scheduler.remove("a")
    assert [name for name, _, _ in step(scheduler)] == ["big"]


def test_the_youngest_gives_way_and_returns_to_the_head_of_the_queue():
    scheduler = make_scheduler(num_pages=4, budget=64)
    add(scheduler, "old", [1] * 4)
    step(scheduler)
    young = add(scheduler, "young", [2] * 3)
    last = add(scheduler, "last", [3])
    step(scheduler)
    assert [seq.request_id for seq in scheduler.running] == ["old", "young"]
    for _ in range(8):
        step(scheduler)
    assert scheduler.num_preemptions == 1
    assert list(scheduler.waiting) == [young, last]
    assert (young.pages, young.num_computed, young.row) == ([], 0, -1)
    scheduler.remove("old")
    assert step(scheduler)[0] == ("young", 0, len(young.token_ids) - 1)


def test_a_cached_prefix_is_skipped_but_the_last_token_is_computed():
    scheduler = make_scheduler(caching=True, budget=64)
    add(scheduler, "a", range(8))
    step(scheduler)
    scheduler.remove("a")
    again = add(scheduler, "b", range(8))
    longer = add(scheduler, "c", [*range(8), 9, 9])
    assert step(scheduler) == [("b", 4, 4), ("c", 8, 2)]
    assert (again.num_cached, longer.num_cached) == (4, 8)
    assert again.pages[0] == longer.pages[0]
    assert scheduler.num_cached_tokens == 12


def test_the_end_of_a_cached_prefix_is_reused_first():
    """Pages are found from the first on: without its beginning the rest of a prefix is worth nothing."""
    scheduler = make_scheduler(num_pages=4, caching=True, budget=64)
    add(scheduler, "a", range(16))
    step(scheduler)
    scheduler.remove("a")
    add(scheduler, "b", [90] * 3)
    assert step(scheduler) == [("b", 0, 3)]  # on the page of tokens 12 to 15
    scheduler.remove("b")
    add(scheduler, "c", range(16))
    assert step(scheduler) == [("c", 12, 4)]


def test_a_request_that_waits_for_room_leaves_its_prefix_in_that_order():
    scheduler = make_scheduler(num_pages=6, caching=True, budget=64)
    add(scheduler, "a", range(16))
    step(scheduler)
    scheduler.remove("a")
    add(scheduler, "running", [90] * 3)
    step(scheduler)
    add(scheduler, "big", [*range(16), *[91] * 8])  # its first pages are there, but not enough for the others
    while len(scheduler.sequences["running"].pages) < 3:  # the free page, then a cached one
        assert [name for name, _, _ in step(scheduler)] == ["running"]
    scheduler.remove("big")
    scheduler.remove("running")
    add(scheduler, "again", range(16))
    assert step(scheduler) == [("again", 12, 4)]


def test_generated_tokens_are_cached_too():
    scheduler = make_scheduler(caching=True)
    seq = add(scheduler, "a", range(3))
    for _ in range(6):
        step(scheduler, token=5)
    scheduler.remove("a")
    add(scheduler, "b", [*seq.token_ids[:8], 7])
    assert step(scheduler) == [("b", 8, 1)]


def test_prompt_logprobs_do_not_use_the_cache_until_delivered():
    scheduler = make_scheduler(caching=True, budget=64)
    add(scheduler, "a", range(8))
    step(scheduler)
    add(scheduler, "b", range(9), prompt_logprobs=1)
    assert step(scheduler)[-1] == ("b", 0, 9)


def test_remove_is_idempotent_and_knows_every_state():
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting = add(scheduler, "running", [1]), add(scheduler, "waiting", [1])
    step(scheduler)
    assert scheduler.remove("running") is running
    assert scheduler.remove("waiting") is waiting
    assert scheduler.remove("running") is None
    assert scheduler.remove("never") is None
    assert scheduler.pages.num_used == 0


def test_a_double_id_is_refused():
    scheduler = make_scheduler()
    add(scheduler, "a", [1])
    with pytest.raises(ValueError, match="'a' is in use"):
        add(scheduler, "a", [1])


class SchedulerMachine(RuleBasedStateMachine):
    """Random traffic; ids are given out once, and each must end exactly once."""

    requests = Bundle("requests")

    def __init__(self):
        super().__init__()
        self.num_pages, self.page_size, self.max_num_seqs, self.budget = 10, 3, 3, 5
        self.scheduler = make_scheduler(self.num_pages, self.page_size, self.max_num_seqs, self.budget, caching=True)
        self.ended = []
        self.num_added = 0
        self.in_flight = []  # chunks of the step that was begun and is not over; always empty in the plain order

    @rule(target=requests, length=st.integers(1, 20), max_tokens=st.integers(1, 11), kind=st.integers(0, 2),
          logprobs=st.sampled_from([None, None, None, 0]),
          path=st.sampled_from([("a", "a1"), ("a", "a2"), ("b", "b1")]))  # fmt: skip
    def submit(self, length, max_tokens, kind, logprobs, path):
        """At most 20 + 11 - 1 tokens are kept: exactly the ten pages. Few kinds of prompts, so that prefixes meet."""
        self.num_added += 1
        name = f"r{self.num_added}"
        add(self.scheduler, name, [kind] * length, max_tokens, path=path, prompt_logprobs=logprobs)
        return name

    @rule(name=consumes(requests))
    def abort(self, name):
        if self.scheduler.remove(name) is not None:
            self.ended.append(name)

    @rule(stops=st.integers(0, 7))
    @precondition(lambda self: self.scheduler.sequences)
    def step(self, stops):
        self.advance(stops)

    def advance(self, stops=0):
        chunks = self.scheduler.schedule()
        assert chunks or self.in_flight, "there is work and nothing was scheduled"
        assert len(chunks) <= self.max_num_seqs
        assert sum(chunk.num_tokens for chunk in chunks) <= self.budget
        assert len({id(chunk.seq) for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            seq = chunk.seq
            assert chunk.num_tokens >= 1
            assert chunk.row == seq.row
            assert seq.num_in_flight <= len(self.in_flight)
            assert chunk.start == seq.num_computed
            assert len(seq.pages) * self.page_size >= chunk.end
            self.scheduler.begin(chunk)
        self.finish(chunks, stops)

    def finish(self, chunks, stops):
        """Apply what a step gave, as the engine does: nothing to requests that ended since it was scheduled."""
        for index, chunk in enumerate(chunks):
            seq = chunk.seq
            if self.scheduler.sequences.get(seq.request_id) is not seq:
                continue
            self.scheduler.commit(chunk)
            if chunk.samples:
                seq.token_ids.append(stops % 3)
                if seq.num_output == seq.sampling.max_tokens or stops >> index & 1:
                    assert self.scheduler.remove(seq.request_id) is seq
                    self.ended.append(seq.request_id)

    @invariant()
    def every_page_is_accounted_for(self):
        scheduler = self.scheduler
        held = [page for seq in scheduler.running for page in seq.pages]
        for page in range(self.num_pages):
            assert scheduler.pages.num_references(page) == held.count(page)
        assert scheduler.pages.num_used == len(set(held))
        assert not any(seq.pages for seq in scheduler.waiting)

    @invariant()
    def every_request_is_in_one_place(self):
        scheduler = self.scheduler
        places = [*scheduler.running, *scheduler.waiting]
        assert sorted(seq.request_id for seq in places) == sorted(scheduler.sequences)
        for path in {seq.path for seq in places}:
            arrivals = [int(seq.request_id[1:]) for seq in places if seq.path == path]
            assert arrivals == sorted(arrivals), "within a connection first come, first served"
        assert scheduler.running == sorted(scheduler.running, key=lambda seq: seq.arrival)
        rows = [seq.row for seq in scheduler.running] + scheduler._free_rows
        assert sorted(rows) == list(range(self.max_num_seqs))

    def teardown(self):
        """Without new arrivals everything ends, in a number of steps that the work bounds."""
        bound = sum(2 * len(seq.token_ids) + seq.sampling.max_tokens for seq in self.scheduler.sequences.values()) + 1
        for _ in range(bound * self.max_num_seqs):
            if not self.scheduler.sequences:
                break
            self.advance()
        assert sorted(self.ended) == sorted(f"r{i + 1}" for i in range(self.num_added))
        assert self.scheduler.pages.num_available == self.num_pages
        assert not self.scheduler.waiting
        assert not self.scheduler.running


class OverlapMachine(SchedulerMachine):
    """A step is over only after the next one has begun."""

    def finish(self, chunks, stops):
        before, self.in_flight = self.in_flight, chunks
        super().finish(before, stops)

    @rule()
    @precondition(lambda self: self.in_flight)
    def take_back(self):
        """The step failed: its requests go on as if it had not been scheduled."""
        for chunk in self.in_flight:
            if self.scheduler.sequences.get(chunk.seq.request_id) is chunk.seq:
                self.scheduler.take_back(chunk)
                assert (chunk.seq.num_in_flight, chunk.seq.num_promised) == (0, 0)
        self.in_flight = []


_SETTINGS = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None)
TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = _SETTINGS
TestOverlapMachine = OverlapMachine.TestCase
TestOverlapMachine.settings = _SETTINGS
