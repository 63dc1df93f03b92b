"""A sequence that gives way while a step of it runs is not admitted before that step is over, and keeps its turn."""

from engine.fair_queue import FairQueue, Shares
from engine.pages import PageAllocator
from engine.scheduler import Scheduler
from tests.engine.test_scheduler import add, make_scheduler, step


def launch(scheduler):
    """Begin a step; nothing of it is collected yet."""
    chunks = scheduler.schedule()
    for chunk in chunks:
        scheduler.begin(chunk)
    return chunks


def collect(scheduler, chunks):
    for chunk in chunks:
        scheduler.commit(chunk)
        if chunk.samples:
            chunk.seq.token_ids.append(1)


def test_a_preempted_sequence_waits_until_its_step_is_over():
    """It gives back the pages of a whole window and needs fewer to begin again, so there is room for it at once."""
    pages = PageAllocator(60)
    scheduler = Scheduler(pages, None, page_size=4, max_num_seqs=4, max_num_batched_tokens=4, window=33)
    old, young = add(scheduler, "old", range(3)), add(scheduler, "young", range(50, 80))
    while young.num_output < 1:
        step(scheduler)
    pages.allocate(pages.num_available)
    before, launched = [], launch(scheduler)
    while not scheduler.num_preemptions:
        collect(scheduler, before)
        before, launched = launched, launch(scheduler)
    assert [chunk.seq for chunk in before] == [old, young]
    assert [chunk.seq for chunk in launched] == [old]
    assert list(scheduler.waiting) == [young]
    collect(scheduler, before)
    assert [chunk.seq for chunk in launch(scheduler)] == [old, young]


def test_a_preempted_sequence_stands_in_front_of_those_that_came_later():
    scheduler = make_scheduler()
    first, second = add(scheduler, "first", [1]), add(scheduler, "second", [2])
    queue = FairQueue()
    queue.put(second)
    queue.put(first)
    assert queue.first(Shares([])) is first
