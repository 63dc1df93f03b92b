"""Fair turns (G83): counted in steps of the scheduler, so that no clock and no model decide."""

from engine.fair_queue import split_evenly
from tests.engine.test_scheduler import add, make_scheduler, step
from tests.tables import rows

HOG, NEWCOMER = ("hog", "h1"), ("newcomer", "n1")
QUESTION = [2] * 4
NUM_TOKENS = 20


def finish(scheduler, seq, max_steps=3000):
    """Step until the request has ended at its `max_tokens`; return the number of steps."""
    for num_steps in range(1, max_steps):
        step(scheduler)
        for other in list(scheduler.sequences.values()):
            if other.num_output >= other.sampling.max_tokens:
                scheduler.remove(other.request_id)
        if seq.request_id not in scheduler.sequences:
            return num_steps
    raise AssertionError(f"not finished after {max_steps} steps")


def ask(scheduler, path=NEWCOMER, name="question"):
    return finish(scheduler, add(scheduler, name, QUESTION, NUM_TOKENS, path=path))


def busy(prompts, max_tokens=400, path=HOG, **sizes):
    """A scheduler that has been working for one client for a while."""
    scheduler = make_scheduler(**{"num_pages": 4000, "max_num_seqs": 8, "budget": 32, **sizes})
    for index, prompt in enumerate(prompts):
        add(scheduler, f"hog-{index}", prompt, max_tokens, path=path)
    for _ in range(20):
        step(scheduler)
    return scheduler


ALONE = ask(make_scheduler(num_pages=4000, max_num_seqs=8, budget=32))

BURSTS = {
    "200 requests": lambda: busy([[1] * 4] * 200),
    "200 long prompts": lambda: busy([[1] * 900] * 200, budget=16),
    "few pages": lambda: busy([[1] * 40] * 200, num_pages=110),
    "more places than requests": lambda: busy([[1] * 2000] * 6),
}


@rows("make_busy", *BURSTS.values())
def test_a_single_question_overtakes_a_clients_burst_g83(make_busy):
    """Long answers hold all places, or long prompts the budget; the question does not wait until they end."""
    assert ask(make_busy()) <= 2 * ALONE


def test_choices_of_one_request_count_each_g83():
    """n=128 from the same address: the question has the same client, and another connection."""
    scheduler = busy([[1] * 4] * 128)
    assert ask(scheduler, path=("hog", "h2")) <= 2 * ALONE


def test_the_same_connection_waits_for_its_turn_g83():
    assert ask(busy([[1] * 4] * 32, max_tokens=100), path=HOG) > 10 * ALONE


def test_many_connections_of_one_client_get_no_more_turns_than_one_g83():
    scheduler = make_scheduler(num_pages=4000, max_num_seqs=8)
    for index in range(50):
        add(scheduler, f"hog-{index}", [1], path=("hog", f"h{index}"))
    for index in range(50):
        add(scheduler, f"other-{index}", [1], path=("other", "o1"))
    for _ in range(10):
        step(scheduler)
    assert sorted(seq.client for seq in scheduler.running) == ["hog"] * 4 + ["other"] * 4


def test_a_stream_of_newcomers_starves_nobody_g83():
    """New clients come in every step, each with a question of its own; the burst still advances one after another."""
    scheduler = busy([[1] * 4] * 20, max_tokens=30, max_num_seqs=3)
    oldest = scheduler.running[0]
    count = 0
    while oldest.request_id in scheduler.sequences:
        for seq in [seq for seq in scheduler.running if seq.num_output >= seq.sampling.max_tokens]:
            scheduler.remove(seq.request_id)
        count += 1
        add(scheduler, f"new-{count}", [2], 3, path=(f"new-{count}", "c"))
        step(scheduler)
    assert count <= 31
    waiting = [seq for seq in scheduler.waiting if seq.client == "hog"]
    for _ in range(400):
        count += 1
        add(scheduler, f"new-{count}", [2], 3, path=(f"new-{count}", "c"))
        step(scheduler)
        for seq in [seq for seq in scheduler.running if seq.num_output >= seq.sampling.max_tokens]:
            scheduler.remove(seq.request_id)
    assert sum(seq.request_id not in scheduler.sequences for seq in waiting) >= 1


def test_who_gives_way_is_the_youngest_of_whoever_runs_the_most_g83():
    scheduler = make_scheduler(num_pages=4000, max_num_seqs=4)
    for name in ("old", "young", "youngest"):
        add(scheduler, name, [1], path=HOG)
    add(scheduler, "other", [1], path=("other", "o1"))
    step(scheduler)
    add(scheduler, "question", [1], path=NEWCOMER)
    assert [name for name, _, _ in step(scheduler)] == ["old", "young", "other", "question"]
    assert [seq.request_id for seq in scheduler.waiting] == ["youngest"]
    add(scheduler, "another", [1], path=("third", "t1"))
    assert [name for name, _, _ in step(scheduler)] == ["old", "other", "question", "another"]
    add(scheduler, "fifth", [1], path=("fifth", "f1"))
    assert [name for name, _, _ in step(scheduler)] == ["old", "other", "question", "another"], "one each is fair"


def test_what_one_client_does_not_need_goes_to_the_others():
    for demands, budget, granted in [
        ({"a": 100}, 64, {"a": 64}),
        ({"a": 100, "b": 100}, 64, {"a": 32, "b": 32}),
        ({"a": 100, "b": 10}, 64, {"a": 54, "b": 10}),
        ({"a": 10, "b": 100, "c": 5}, 64, {"a": 10, "b": 49, "c": 5}),
        ({"a": 5, "b": 5}, 64, {"a": 5, "b": 5}),
        ({"a": 9, "b": 9, "c": 9}, 1, {"a": 1, "b": 0, "c": 0}),
        ({"a": 9, "b": 9}, 0, {"a": 0, "b": 0}),
        ({}, 64, {}),
    ]:
        assert split_evenly(demands, budget) == granted, (demands, budget, granted)
