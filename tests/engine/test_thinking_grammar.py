"""A budget of reasoning tokens beside a grammar: both hold, and where they contradict each other the grammar does."""

from functools import partial

from engine.grammar_spec import free_tokens, regex, sequence, text, token
from engine.types import ThinkingBudget
from tests.engine.fakes import FakeModel
from tests.engine.grammars import CONTROL, EOS, bound, ids, make_core, text_of
from tests.engine.requests import run_all, tokens_of
from tests.tables import rows

BUDGET = ThinkingBudget(
    num_tokens=5, begin_ids=(EOS,), end_ids=(CONTROL,), close_ids=(CONTROL, *ids("o")), begins_inside=True
)
in_both_orders = rows("make", partial(make_core, overlap=False), partial(make_core, overlap=True))


@in_both_orders
def test_reasoning_ends_and_the_answer_keeps_its_form(make):
    format_ = sequence(free_tokens([CONTROL, EOS]), token(CONTROL), regex("[a-z]{3}"))
    requests = [bound(f"r{seed}", format_, thinking=BUDGET, seed=seed) for seed in range(4)]
    for outputs in run_all(make(FakeModel(eos_token_ids=(EOS,))), requests).values():
        tokens = tokens_of(outputs)
        end = tokens.index(CONTROL)
        assert end <= 5
        answer = text_of(token for token in tokens[end + 1 :] if token != EOS)
        assert len(answer) == 3
        assert answer.isalpha()
        assert end < 5 or answer.startswith("o")
        assert outputs[-1].finish_reason == "stop"


@in_both_orders
def test_a_grammar_that_allows_no_end_decides(make):
    [outputs] = run_all(make(), [bound("r", sequence(text("abcdefgh"), token(CONTROL)), thinking=BUDGET)]).values()
    assert tokens_of(outputs)[:9] == [*ids("abcdefgh"), CONTROL]
