"""Answers that follow a grammar: in every order of steps, beside others, ended as they should, compiled apart."""

import json
import re
import time
from concurrent.futures import Future
from functools import partial

import jsonschema_rs
import msgspec
import pytest

from engine.errors import GrammarError
from engine.grammar_spec import (
    ebnf,
    free_tokens,
    json_object,
    json_schema,
    one_of,
    regex,
    repeated,
    sequence,
    text,
    token,
)
from tests.engine.fakes import FakeModel, fake_core
from tests.engine.grammars import CONTROL, EOS, bound, compiler, ids, make_core, text_of
from tests.engine.requests import request, run_all, tokens_of
from tests.tables import rows

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "kind": {"enum": ["a", "bc", 3]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 1},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
FORMATS = {
    "schema": json_schema(SCHEMA, max_whitespace=1),
    "regex": regex("[a-c]{2,4}-[0-9]{1,5}"),
    "ebnf": ebnf('root ::= "(" root ")" | "x"'),
    "choice": one_of(text("red"), text("green"), text("reddish")),
    "tokens": sequence(free_tokens([CONTROL, EOS]), token(CONTROL), text("ok")),
}
IS_RIGHT = {
    "schema": lambda answer: jsonschema_rs.is_valid(SCHEMA, json.loads(answer)),
    "regex": re.compile("[a-c]{2,4}-[0-9]{1,5}").fullmatch,
    "ebnf": lambda answer: answer == "(" * (len(answer) // 2) + "x" + ")" * (len(answer) // 2),
    "choice": lambda answer: answer in ("red", "green", "reddish"),
    "tokens": lambda answer: answer.endswith("ok"),
}

in_both_orders = rows("make", partial(make_core, overlap=False), partial(make_core, overlap=True))
LOADS = ({"num_pages": 200}, {"num_pages": 40, "max_num_batched_tokens": 8}, {"num_pages": 24, "page_size": 4})


def load():
    """Requests of every format, some in two choices, some plain, with prompts that are read in parts."""
    items = []
    for index, (name, format_) in enumerate(FORMATS.items()):
        for seed in range(2):
            kinds = [{}, {"logprobs": 1}, {"top_p": 0.9, "frequency_penalty": 0.5}, {"temperature": 0.0}]
            items.append(bound(f"{name} {seed}", format_, range(1, 20), **{"seed": seed} | kinds[(index + seed) % 4]))
    return [*items, *(request(f"free {n}", range(1, 25), 20, temperature=1.0, seed=n) for n in range(3))]


@rows("settings", *LOADS)
def test_answers_fit_and_are_the_same_in_every_order(settings):
    """Chunked prompts, preemption, overlap, several choices and log-probabilities do not change an answer."""
    answers, num_preemptions = [], 0
    for overlap in (False, True):
        core = make_core(FakeModel(max_model_len=84), overlap=overlap, **settings)
        outputs = run_all(core, load())
        answers.append({name: tokens_of(its) for name, its in outputs.items()})
        num_preemptions += core.stats().num_preemptions
        for name, its in outputs.items():
            kind = name.split()[0]
            if its[-1].finish_reason == "stop" and kind in FORMATS:
                assert IS_RIGHT[kind](text_of(tokens_of(its)[:-1])), name
            else:
                assert kind not in ("schema", "regex", "choice"), "answers that cannot be long end"
        assert core.stats().num_pages_used == 0
    assert answers[0] == answers[1]
    alone = {item.request_id: tokens_of(run_all(make_core(), [item])[item.request_id]) for item in load()[:3]}
    assert {name: answers[0][name] for name in alone} == alone
    assert bool(num_preemptions) == (settings["num_pages"] < 30)


def test_requests_without_a_grammar_get_the_tokens_they_got_before():
    plain = [item for item in load() if item.grammar is None]
    beside = run_all(make_core(), load())
    for name, its in run_all(fake_core(), plain).items():
        assert tokens_of(beside[name]) == tokens_of(its)


ENDINGS = [
    # format, sampling -> text, why it ends; the last token of a "stop" is not text
    (text("abc"), {}, "abc", "stop"),
    (text("abc"), {"max_tokens": 2}, "ab", "length"),
    (text("abc"), {"min_tokens": 9}, "abc", "stop"),
    (repeated(text("a"), 1, None), {"min_tokens": 7, "max_tokens": 7}, "aaaaaaa", "length"),
    (repeated(text("a"), 1, 3), {"min_tokens": 9}, "aaa", "stop"),
    (sequence(text("a"), token(CONTROL)), {"stop_token_ids": (CONTROL,)}, "a", "stop"),
    (text("abc"), {"stop_token_ids": tuple(ids("b"))}, "a", "stop"),
    (text("abc"), {"stop_token_ids": tuple(ids("z")), "logit_bias": {EOS: -100.0}}, "abc", "stop"),
    (text("abc"), {"ignore_eos": True}, "abc", "stop"),
]


@in_both_orders
@rows("format_, sampling, answer, reason", *ENDINGS)
def test_an_answer_ends_where_its_grammar_does(make, format_, sampling, answer, reason):
    outputs = run_all(make(), [bound("a", format_, **sampling)])["a"]
    tokens = tokens_of(outputs)
    assert outputs[-1].finish_reason == reason
    assert text_of(tokens[:-1] if reason == "stop" else tokens) == answer
    assert outputs[-1].stop_reason == (tokens[-1] if reason == "stop" else None)


def test_text_of_a_grammar_has_no_control_tokens():
    """A model that wants nothing but its control token, in formats that allow any character."""
    for format_ in (regex(".+"), {"type": "any_text"}, json_schema({"type": "string"}), json_object()):
        outputs = run_all(make_core(), [bound("a", format_, logit_bias={CONTROL: 100.0}, max_tokens=20)])["a"]
        assert CONTROL not in tokens_of(outputs)
    free = bound("a", free_tokens([]), logit_bias={CONTROL: 100.0}, max_tokens=5)
    assert tokens_of(run_all(make_core(), [free])["a"]) == [CONTROL] * 5


DEEP_FAULT = {"properties": {"b": {}, "a": {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "nul"}]}}}}
SHARED_FAULT = {
    "properties": {"a": {"$ref": "#/$defs/b"}},
    "required": ["a"],
    "$defs": {"b": {"type": "object", "properties": {"c": {"enum": []}, "d": {"$ref": "#/$defs/b"}}}},
}
BAD = [
    (json_schema({"type": "objct"}), 'Unsupported type "objct"'),
    (json_schema({"$ref": "#/$defs/no"}), "Cannot find field '$defs'"),
    (one_of(text("a"), json_schema(DEEP_FAULT)), "(at properties.a.items.anyOf.1 of the schema)"),
    (json_schema(SHARED_FAULT), "(at $defs.b.properties.c of the schema)"),
    (regex("(a"), "The parenthesis is not closed"),
    (ebnf("root ::= no"), 'Rule "no" is not defined'),
    ({"type": "what"}, "Format type not recognized: what"),
    (token(97), "Token id 97"),
    (text("x" * 70000), "may have 65536"),
]


@rows("format_, reason", *BAD)
def test_a_grammar_that_cannot_be_compiled_is_refused_by_field(format_, reason):
    core = make_core(max_grammar_bytes=65536)
    outputs = run_all(core, [bound("bad", format_), bound("good", text("ab"))])
    [refusal] = outputs["bad"]
    assert (refusal.finish_reason, refusal.error_param) == ("error", "response_format")
    assert refusal.error.startswith("response_format")
    assert reason in refusal.error
    assert ".cc" not in refusal.error, "internals of the library"
    assert text_of(tokens_of(outputs["good"])[:-1]) == "ab"


class SlowCompiler:
    """Compiles when it is told to."""

    def __init__(self):
        self.futures = {}
        self.make_matcher = compiler().make_matcher

    def compile(self, format_json):
        return self.futures.setdefault(format_json, Future())

    def finish(self, error=None):
        for format_json, future in self.futures.items():
            if error is not None:
                future.set_exception(error)
            elif not future.done():
                future.set_result(compiler().compile(format_json).result())


@in_both_orders
def test_a_slow_compilation_delays_nobody_else(make):
    slow = SlowCompiler()
    core = make(grammars=slow)
    alone = run_all(make(), [request("other", [1, 2], 12, ignore_eos=True)])["other"]
    core.add(bound("slow", text("abc")))
    core.add(request("other", [1, 2], 12, ignore_eos=True))
    outputs = []
    for _ in range(14):
        outputs += core.step()
    assert tokens_of(outputs) == tokens_of(alone), "twelve tokens in as many steps as without the other request"
    assert (core.stats().num_waiting, core.stats().num_running, core.stats().num_pages_used) == (1, 0, 0)
    assert core.has_work
    assert core.step() == []
    slow.finish()
    assert text_of(tokens_of(run_all(core)["slow"])[:-1]) == "abc"


def test_an_engine_that_only_compiles_does_not_spin():
    core = make_core(grammars=SlowCompiler())
    core.add(bound("slow", text("abc")))
    start_s = time.monotonic()
    assert [core.step() for _ in range(10)] == [[]] * 10
    assert time.monotonic() - start_s > 0.04, "each step waits 5 ms for the compiler"


@in_both_orders
def test_a_request_that_is_compiled_can_be_aborted_and_counts(make):
    slow = SlowCompiler()
    core = make(grammars=slow, max_num_seqs=1, max_queued_requests=0)
    core.add(bound("a", text("abc")))
    core.add(request("b", [1]))
    [refusal] = core.step()
    assert (refusal.request_id, refusal.overloaded) == ("b", True)
    with pytest.raises(ValueError, match="'a' is in use"):
        core.add(bound("a", text("abc")))
    core.abort("a")
    assert [output.finish_reason for output in core.step()] == ["abort"]
    slow.finish()
    assert not core.has_work
    core.add(bound("a", text("abc")))
    assert text_of(tokens_of(run_all(core)["a"])[:-1]) == "abc"


def test_an_id_is_not_taken_twice():
    core = make_core()
    core.add(request("a", [1, 2], ignore_eos=True))
    core.step()
    with pytest.raises(ValueError, match="'a' is in use"):
        core.add(bound("a", text("abc")))
    assert [output.finish_reason for output in run_all(core)["a"]][-1] == "length"


def test_equal_grammars_are_compiled_once():
    slow = SlowCompiler()
    core = make_core(grammars=slow)
    for index in range(3):
        core.add(bound(f"a{index}", text("abc"), seed=index))
    assert len(slow.futures) == 1
    slow.finish(GrammarError("it is no good"))
    outputs = run_all(core)
    assert [its[-1].error for its in outputs.values()] == ["response_format cannot be used: it is no good"] * 3


@in_both_orders
def test_an_abort_frees_a_request_in_the_middle_of_its_grammar(make):
    core = make()
    core.add(bound("a", repeated(text("ab"), 50, None)))
    outputs = []
    while len(tokens_of(outputs)) < 5:
        outputs += core.step()
    core.abort("a")
    assert run_all(core)["a"][-1].finish_reason == "abort"
    assert (core.stats().num_pages_used, core.has_work) == (0, False)


@in_both_orders
def test_a_grammar_that_gets_too_slow_fails_its_request_alone(make, monkeypatch):
    monkeypatch.setattr("engine.grammar_matcher._MOST_S", -1.0)
    core = make()
    outputs = run_all(core, [bound("slow", text("abc")), request("fine", [7], 6, ignore_eos=True)])
    assert outputs["slow"][-1].finish_reason == "error"
    assert "longer than" in outputs["slow"][-1].error
    assert outputs["fine"][-1].finish_reason == "length"


def test_a_request_with_a_grammar_survives_the_wire():
    item = bound("a", FORMATS["schema"])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(item), type=type(item)) == item


def test_a_model_whose_logits_are_not_finite_is_blamed_with_a_grammar_too():
    core = make_core(FakeModel(nan_after=6))
    [outputs] = run_all(core, [bound("r", text("abc"))]).values()
    assert "not a number" in outputs[-1].error
    assert core.stats().num_not_finite == 1
