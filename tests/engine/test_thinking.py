"""A budget of reasoning tokens: what is forced when it is used, whatever the model would have written."""

from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.thinking import ThinkingLimit, both
from engine.types import ThinkingBudget
from tests.engine.fakes import FakeModel, fake_core, in_both_orders
from tests.engine.requests import request, run_all, tokens_of
from tests.tables import rows

VOCAB = 8
BEGIN, END, CLOSE, BARRED = (1, 2), (3, 4), (3, 5), 2
budget_of = partial(ThinkingBudget, begin_ids=BEGIN, end_ids=END, close_ids=CLOSE, barred_id=BARRED)


def write(limit, wishes):
    """What comes of a model that wants these tokens in turn: a forbidden one becomes the lowest that is allowed."""
    written = []
    for wish in wishes:
        allowed = limit(written)
        written.append(wish if allowed is None or allowed[wish] else int(allowed.argmax()))
    return written


def num_thought(written, *, begins_inside=False):
    """Reasoning tokens of an answer, counted from the definition."""
    count, inside = 0, begins_inside
    for index, token in enumerate(written):
        if token in END:
            inside = False
        elif inside:
            count += 1
        elif tuple(written[max(0, index - 1) : index + 1]) == BEGIN:
            inside = True
    return count


@rows(
    "num_tokens, begins_inside, wishes, written",
    (3, False, [1, 2, 6, 6, 6, 6, 6, 2, 7], [1, 2, 6, 6, 6, 3, 5, 0, 7]),
    (0, False, [1, 2, 6, 6, 6], [1, 2, 3, 5, 6]),
    (2, True, [6, 6, 6, 6, 7], [6, 6, 3, 5, 7]),
    (3, False, [1, 2, 6, 4, 7, 7, 7, 7], [1, 2, 6, 4, 7, 7, 7, 7]),  # it ended early enough
    (3, False, [1, 2, 6, 4, 1, 2, 6, 6, 6, 6], [1, 2, 6, 4, 1, 2, 6, 6, 3, 5]),  # parts count together
    (1, False, [1, 2, 6, 6, 6, 1, 2, 7, 7], [1, 2, 6, 3, 5, 1, 2, 3, 5]),  # a new part ends at once
    (3, False, [6, 1, 6, 2, 6, 6, 6, 6], [6, 1, 6, 2, 6, 6, 6, 6]),  # it never began
)
def test_the_closing_tokens_follow_once_the_budget_is_used(num_tokens, begins_inside, wishes, written):
    limit = ThinkingLimit(budget_of(num_tokens=num_tokens, begins_inside=begins_inside), VOCAB)
    assert write(limit, wishes) == written


@settings(max_examples=200)
@given(st.lists(st.integers(0, VOCAB - 1), max_size=40), st.integers(0, 5), st.booleans())
def test_no_answer_thinks_more_than_its_budget(wishes, num_tokens, begins_inside):
    budget = budget_of(num_tokens=num_tokens, begins_inside=begins_inside)
    written = write(ThinkingLimit(budget, VOCAB), wishes)
    assert num_thought(written, begins_inside=begins_inside) <= num_tokens
    fresh = ThinkingLimit(budget, VOCAB)  # reads all tokens at once, as after a step that failed
    allowed = fresh(written)
    again = fresh(written)
    assert (allowed is None) == (again is None)
    assert allowed is None or (allowed == again).all()


@in_both_orders
def test_the_engine_forces_the_tokens(make_core):
    budget = ThinkingBudget(num_tokens=5, begin_ids=(90,), end_ids=(91,), close_ids=(91, 92), begins_inside=True)
    core = make_core(FakeModel(eos_token_ids=()))
    free, limited = request("free", [5, 6], 12), request("limited", [5, 6], 12, thinking=budget)
    outputs = run_all(core, [free, limited])
    free_tokens, tokens = tokens_of(outputs["free"]), tokens_of(outputs["limited"])
    assert tokens[:5] == free_tokens[:5]
    assert tokens[5:7] == [91, 92] != free_tokens[5:7]
    assert len(tokens) == 12


@in_both_orders
@rows("stop, num_tokens", (91, 6), (92, 7))
def test_a_forced_stop_token_ends_the_answer_before_min_tokens(make_core, stop, num_tokens):
    budget = ThinkingBudget(num_tokens=5, begin_ids=(90,), end_ids=(91,), close_ids=(91, 92), begins_inside=True)
    core = make_core(FakeModel(eos_token_ids=()))
    item = request("a", [5, 6], 20, thinking=budget, min_tokens=15, stop_token_ids=(stop,))
    [outputs] = run_all(core, [item]).values()
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)
    assert len(tokens_of(outputs)) == num_tokens
    assert core.stats().num_not_finite == 0


def test_a_preempted_answer_keeps_its_count():
    budget = ThinkingBudget(num_tokens=30, begin_ids=(90,), end_ids=(91,), close_ids=(91,), begins_inside=True)
    asked = [request(name, [5, 6, number], 60, thinking=budget) for number, name in enumerate("abcd")]
    core = fake_core(FakeModel(eos_token_ids=()), num_pages=20)
    outputs = run_all(core, asked)
    assert core.stats().num_preemptions
    forced = []
    for item in asked:
        [alone] = run_all(fake_core(FakeModel(eos_token_ids=()), num_pages=20), [item]).values()
        assert tokens_of(outputs[item.request_id]) == tokens_of(alone)
        forced.append(tokens_of(alone).index(91) == 30)
    assert any(forced)


def test_two_masks_allow_what_both_allow():
    def only(*ids):
        return lambda generated: np.isin(np.arange(VOCAB), ids)

    def chosen(mask):
        return mask([]).nonzero()[0].tolist()

    even = only(0, 2, 4)
    assert chosen(both(even, only(0, 1, 2))) == [0, 2]
    assert both(even, None) is even
    assert chosen(both(lambda generated: None, even)) == [0, 2, 4]
    assert chosen(both(even, only(5))) == [0, 2, 4]  # they agree on nothing: the first decides
