"""When sliding pages are taken and go, who waits or gives way for them, and what a prefix hit needs of them."""

import random

from engine.page_needs import PageNeeds
from engine.pages import PageAllocator
from engine.paging import Paging
from engine.prefix_cache import PrefixCache
from engine.scheduler import Scheduler
from engine.sequence import NO_PAGE
from tests.engine.test_scheduler import add, step


def make_scheduler(num_pages, page_size=4, window=9, budget=8):
    pages = PageAllocator(num_pages)
    cache = PrefixCache(pages)
    return Scheduler(
        pages, cache, page_size=page_size, max_num_seqs=4, max_num_batched_tokens=budget, window=window
    )  # fmt: skip


def run_alone(scheduler, name, prompt):
    """Compute the prompt and one token more; returns the tokens that came from the cache."""
    seq = add(scheduler, name, prompt)
    while seq.num_output < 2:
        step(scheduler)
    scheduler.remove(name)
    return seq.num_cached


def test_pages_go_when_the_step_that_reads_them_is_over():
    """Token 8 sees the tokens from 0 on, token 16 those from 8 on, token 21 those from 13 on."""
    scheduler = make_scheduler(num_pages=24)
    seq = add(scheduler, "a", range(21))
    launched = []
    for _ in range(3):
        launched += scheduler.schedule()
        scheduler.begin(launched[-1])
    assert [(chunk.start, chunk.end) for chunk in launched] == [(0, 8), (8, 16), (16, 21)]
    assert (len(seq.pages), len(seq.sliding_pages), seq.num_slid_pages) == (6, 6, 0)
    numbers = []
    for chunk in launched:
        scheduler.commit(chunk)
        numbers.append((seq.num_slid_pages, scheduler.pages.num_used))
    assert numbers == [(0, 12), (2, 10), (3, 9)]
    assert seq.sliding_pages[:3] == [NO_PAGE] * 3
    scheduler.remove("a")
    assert scheduler.pages.num_used == 0


def test_a_decoding_request_keeps_its_window_alone():
    scheduler = make_scheduler(num_pages=40, page_size=2, window=4)
    seq = add(scheduler, "a", range(3))
    for _ in range(40):
        step(scheduler)
        assert scheduler.pages.num_used - len(seq.pages) <= 3
    assert len(seq.pages) == 21


def test_a_step_that_is_taken_back_finds_its_pages():
    scheduler = make_scheduler(num_pages=24)
    seq = add(scheduler, "a", range(30))
    step(scheduler)
    step(scheduler)
    [chunk] = scheduler.schedule()
    scheduler.begin(chunk)
    scheduler.take_back(chunk)
    [again] = scheduler.schedule()
    assert (again.start, again.num_tokens) == (16, 8)
    assert NO_PAGE not in seq.sliding_pages[(16 - 8) // 4 :]
    assert len(seq.sliding_pages) == 6


def test_admission_waits_for_the_pages_of_both_kinds():
    scheduler = make_scheduler(num_pages=20, budget=16)
    add(scheduler, "a", range(32))
    assert step(scheduler) == [("a", 0, 16)]
    assert scheduler.pages.num_used == 8 + 2
    other = add(scheduler, "b", range(50, 66))  # its four full pages and four sliding ones are there, but those of "a"
    assert step(scheduler) == [("a", 16, 16)]
    assert other.row == -1
    scheduler.remove("a")
    assert step(scheduler) == [("b", 0, 16)]


def test_a_prompt_is_cut_to_the_sliding_pages_that_are_left():
    scheduler = make_scheduler(num_pages=22, budget=16)
    seq = add(scheduler, "a", range(32))
    step(scheduler)
    held = scheduler.pages.allocate(scheduler.pages.num_available - 1)
    assert step(scheduler) == [("a", 16, 4)]
    scheduler.pages.release(held)
    assert step(scheduler) == [("a", 20, 12)]
    assert seq.num_pending == 1


def test_the_oldest_prompt_takes_pages_from_the_youngest_request_and_other_prompts_wait():
    """All that is free is taken away before each step; a page that the oldest prompt gets is another request's."""
    scheduler = make_scheduler(num_pages=60, budget=12)
    add(scheduler, "oldest", range(46))
    step(scheduler)
    add(scheduler, "middle", range(60, 90), path=("client", ""))
    add(scheduler, "young", [1], path=("another", ""))
    step(scheduler)
    seen = []
    for _ in range(4):
        scheduler.pages.allocate(scheduler.pages.num_available)
        seen.append((step(scheduler), scheduler.num_preemptions))
    assert seen == [
        ([("young", 1, 1), ("oldest", 18, 2), ("middle", 5, 3)], 0),  # to the end of their pages
        ([("oldest", 20, 6)], 1),
        ([("oldest", 26, 2)], 1),
        ([("oldest", 28, 12)], 2),
    ]


def test_the_oldest_prompt_waits_for_its_own_step_in_flight_before_others_give_way():
    """That step gives pages back when it is over."""
    scheduler = make_scheduler(num_pages=60, budget=16)
    add(scheduler, "oldest", range(60))
    step(scheduler)
    add(scheduler, "young", [1], path=("client", ""))

    def launch():
        chunks = {chunk.seq.request_id: chunk for chunk in scheduler.schedule()}
        for chunk in chunks.values():
            scheduler.begin(chunk)
        return chunks

    first = launch()
    assert (first["oldest"].end, first["young"].end) == (31, 1)
    scheduler.pages.allocate(scheduler.pages.num_available)
    assert launch()["oldest"].end == 32  # to the end of its pages
    assert list(launch()) == ["young"]
    scheduler.commit(first["oldest"])
    assert launch()["oldest"].start == 32
    assert scheduler.num_preemptions == 0


def test_hits_at_every_boundary_while_there_is_room():
    scheduler = make_scheduler(num_pages=64)
    assert run_alone(scheduler, "first", range(32)) == 0
    assert run_alone(scheduler, "again", range(32)) == 28
    assert run_alone(scheduler, "half", [*range(17), 90, 91]) == 16
    assert run_alone(scheduler, "short", [*range(5), 90, 91]) == 4
    assert scheduler.num_cached_tokens == 48
    assert scheduler.pages.num_used == 0


def test_a_hit_takes_the_visible_sliding_pages_alone():
    scheduler = make_scheduler(num_pages=64)
    run_alone(scheduler, "first", range(32))
    seq = add(scheduler, "again", range(32))
    assert step(scheduler) == [("again", 28, 4)]
    assert seq.num_slid_pages == (32 - 8) // 4
    assert seq.sliding_pages[:6] == [NO_PAGE] * 6
    assert scheduler.pages.num_used == 8 + 2


def test_hits_shrink_as_pages_are_reused_but_never_lack_a_page_that_is_seen():
    """One page after another is handed out anew, in any order; the hit is the longest that what is left allows."""
    lengths, rng = [], random.Random(0)
    for window in (3, 9, 12, 40):
        needs = PageNeeds(page_size=4, window=window, step_tokens=8)
        pages = PageAllocator(40)
        cache = PrefixCache(pages)
        paging = Paging(pages, cache, needs)
        scheduler = Scheduler(pages, cache, page_size=4, max_num_seqs=4, max_num_batched_tokens=8, window=window)
        run_alone(scheduler, "first", range(40))
        run_alone(scheduler, "other", [*range(18), *range(60, 80)])
        seq = add(scheduler, "probe", range(41))
        for _ in range(40):
            full, sliding = paging._match(seq)
            keys = seq.page_keys
            possible = [
                end
                for end in range(11)
                if all(key in cache for key in keys[:end])
                and all(b"sliding" + key in cache for key in keys[needs.first_visible(4 * end) : end])
            ]
            assert len(full) == max(possible)
            assert len(sliding) == len(full) - needs.first_visible(4 * len(full))
            assert all(pages.num_references(page) == 1 for page in full + sliding)
            lengths.append(len(full))
            pages.release(full + sliding)
            pages._idle = dict.fromkeys(rng.sample(list(pages._idle), len(pages._idle)))
            pages.allocate(1)
        assert len(cache) == 0
    assert len(set(lengths)) > 5


def test_the_pages_that_slid_first_are_reused_first():
    """So the end of a prompt can still be continued when the pool was full once."""
    scheduler = make_scheduler(num_pages=30)
    run_alone(scheduler, "first", range(32))
    run_alone(scheduler, "other", range(50, 66))
    assert run_alone(scheduler, "again", range(32)) == 28
