"""Grammars meant to do harm, and a process that checks grammars but no longer answers."""

import os
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from engine import grammar_check, grammar_compiler, grammar_matcher
from engine.errors import GrammarError, GrammarTooSlow
from engine.grammar_check import GrammarChecker
from engine.grammar_spec import GrammarSpec, ebnf, free_tokens, regex, sequence, text, token
from tests.engine.grammars import CONTROL, VOCABULARY, bound, compiler, make_core
from tests.engine.requests import run_all
from tests.tables import rows

SLOW = regex("((a{1,100}){1,100}){1,100}")
LARGE = text("x" * 1_000_000)  # larger than what a socket holds, so it must be read to be sent


def json_of(format_):
    return GrammarSpec.of(format_, param="x").format_json


@pytest.fixture
def checker():
    checker = GrammarChecker(VOCABULARY, timeout_s=0.5)
    yield checker
    checker.close()


@pytest.mark.processes
def test_a_stopped_process_holds_up_neither_a_large_grammar_nor_the_next_one(checker):
    checker.read_tokenizer_info()
    os.kill(checker._process.pid, signal.SIGSTOP)
    with pytest.raises(GrammarTooSlow, match=r"longer than 0\.5 s"):
        checker.check(json_of(LARGE))
    checker._timeout_s = 60.0
    checker.check(json_of(text("abc")))


def test_a_grammar_that_took_too_long_is_tried_again_after_a_while(monkeypatch):
    kept = compiler()
    late = GrammarTooSlow("the machine was busy")

    def too_slow(*_):
        raise late

    with monkeypatch.context() as patch:
        patch.setattr(GrammarChecker, "check", too_slow)
        refused = kept.compile(json_of(text("try again")))
        assert refused.exception() is late
    assert kept.compile(json_of(text("try again"))) is refused, "it is refused at once for a minute"
    late.raised_s -= 2 * grammar_compiler._RETRY_S
    assert kept.compile(json_of(text("try again"))).exception() is None


@rows(
    "format_",
    ebnf('root ::= root "a"'),
    ebnf("root ::= a\na ::= b\nb ::= a"),
    sequence(text("abc"), ebnf("root ::= root")),
)
def test_a_rule_that_never_ends_is_the_clients_fault(format_):
    [refusal] = run_all(make_core(), [bound("a", format_)])["a"]
    assert refusal.finish_reason == "error"
    assert "can never end" in refusal.error
    assert refusal.error_param == "response_format"


def test_what_stands_behind_free_reasoning_is_tried_too():
    behind = sequence(free_tokens([0, CONTROL]), token(CONTROL), SLOW)
    [refusal] = run_all(make_core(), [bound("slow", behind)])["slow"]
    assert refusal.finish_reason == "error"
    assert "ms a token" in refusal.error
    reason = compiler().compile(json_of(behind)).exception(60)
    assert isinstance(reason, GrammarTooSlow), "it may be sent again after a while"


@rows("num_busy, is_refused", (0, False), (2, False), (3, False), (4, True))
def test_a_busy_machine_is_told_from_a_slow_grammar(num_busy, is_refused):
    """The clock shows more CPU time than a walk may take, as long as the machine is busy."""
    compiled = compiler().compile(json_of(regex("[a-z]{3,40}"))).result(60)
    control_ids, walks = np.array([CONTROL]), []

    def clock():
        is_begin = not walks or walks[-1].is_over
        if is_begin:
            walks.append(SimpleNamespace(is_over=False, is_busy=len(walks) < num_busy))
            return 0.0
        walks[-1].is_over = walks[-1].is_busy
        return 1.0 if walks[-1].is_busy else 0.001

    with pytest.raises(GrammarTooSlow, match="3 ms a token") if is_refused else nullcontext():
        grammar_check.follow(compiled, VOCABULARY, control_ids, clock)
    assert len(walks) == min(num_busy + 1, 4)


def test_a_grammar_that_becomes_slow_later_is_the_clients_fault(monkeypatch):
    core = make_core()
    monkeypatch.setattr(grammar_matcher, "_MOST_S", 0.0)
    last = run_all(core, [bound("slow", text("slow later"))])["slow"][-1]
    assert last.finish_reason == "error"
    assert last.error.startswith("response_format cannot be used: following it takes longer")
    assert last.error_param == "response_format"


def test_a_token_that_the_grammar_forbids_is_our_fault(monkeypatch):
    def forbid(*_):
        raise GrammarError("it forbids the token 7 that was chosen")

    monkeypatch.setattr(grammar_matcher.GrammarMatcher, "accept", forbid)
    last = run_all(make_core(), [bound("a", text("forbidden"))])["a"][-1]
    assert last.error == "the answer's grammar was given up: it forbids the token 7 that was chosen"
    assert last.error_param is None
