"""Turns that a dialect's grammar allows: headers, recipients, thinking, calls; and what its parser reads from them."""

import json
import random

import numpy as np
import pytest
import xgrammar

from engine.grammar_spec import free_tokens, regex, repeated, sequence, text, token
from loaders.chat_templates import TemplateText
from loaders.tokenizer import load_tokenizer
from server.config import ServerConfig
from server.convert import Converter
from server.parsers import choose_grammar, choose_parser
from server.sampling_defaults import SamplingDefaults
from server.structured.answers import arguments, schema_answer
from server.structured.turn import CallRule, TurnRules
from tests.server.conftest import ASSETS
from tests.server.schemas import INTEGER, closed
from tests.server.test_deepseek_parser import MARKERS
from tests.server.test_parser_properties import answer_of
from tests.tables import rows

ANSWER = schema_answer(closed(a=INTEGER), "response_format")
CALLS = tuple(CallRule(name, arguments(closed(a=INTEGER), "tools")) for name in ("f", "g"))
TEMPLATES = {"R1": "<｜tool▁sep｜> ```json", "V3.1": "<｜tool▁sep｜>"}


class ByteTokenizer:
    """DeepSeek's control tokens, and a token for each byte."""

    def __init__(self):
        self.special_tokens = {name: 256 + index for index, name in enumerate(MARKERS)}
        self.vocab_size = 256 + len(MARKERS)

    def token_bytes(self, token_id):
        return MARKERS[token_id - 256].encode() if token_id >= 256 else bytes([token_id])

    def encode(self, text):
        ids = []
        while text:
            marker = next((name for name in MARKERS if text.startswith(name)), None)
            ids += [self.special_tokens[marker]] if marker else text[0].encode()
            text = text[len(marker or text[0]) :]
        return ids


class Compiler:
    """Compiles turns for one tokenizer."""

    def __init__(self, tokenizer, stops):
        self.tokenizer = tokenizer
        special = set(tokenizer.special_tokens.values())
        names = [b"\xff%d" % i if i in special else tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.stop_ids = [tokenizer.special_tokens[name] for name in stops]
        info = xgrammar.TokenizerInfo(names, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=self.stop_ids)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def matcher(self, turn):
        tag = json.dumps({"type": "structural_tag", "format": turn})
        return xgrammar.GrammarMatcher(self._compiler.compile_structural_tag(tag))

    def allows(self, turn, transcript):
        """Whether the turn may be this transcript, and end there."""
        matcher = self.matcher(turn)
        accepted = all(matcher.accept_token(token_id) for token_id in self.tokenizer.encode(transcript))
        return accepted and (matcher.is_completed() or matcher.is_terminated())

    def random_turn(self, turn, seed, num_tokens=400):
        """Ids of a turn chosen at random, control tokens first; None if it does not end."""
        rng, matcher, ids = random.Random(seed), self.matcher(turn), []
        mask = xgrammar.allocate_token_bitmask(1, self.tokenizer.vocab_size)
        while len(ids) < num_tokens:
            if matcher.is_terminated():
                return ids
            matcher.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: self.tokenizer.vocab_size]
            allowed = bits.nonzero()[0].tolist()
            control = [each for each in allowed if each in self.tokenizer.special_tokens.values()]
            ids.append(rng.choice(control if control and rng.random() < 0.3 else allowed))
            assert matcher.accept_token(ids[-1])
        return None


@pytest.fixture(scope="module")
def harmony():
    return Compiler(load_tokenizer(ASSETS), ("<|return|>", "<|call|>", "<|endoftext|>"))


@pytest.fixture(scope="module")
def deepseek():
    return Compiler(ByteTokenizer(), ("<｜end▁of▁sentence｜>",))


def turn_of(compiler, rules, prompt, template=None):
    grammar = choose_grammar(compiler.tokenizer, template)
    return grammar.turn(TurnRules(param="tools", **rules), compiler.tokenizer.encode(prompt))


THOUGHT = "<|channel|>analysis<|message|>So {a}.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>{}<|return|>"
CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
GOOD, BAD = '{"a": 5}', '{"a": "5"}'
JSON_TURN = {"answer": ANSWER}
MUST_CALL = {"calls": CALLS, "must_call": True}
MAY_CALL = {"calls": CALLS}
HARMONY_TURNS = [
    (JSON_TURN, FINAL.format(GOOD), True),
    (JSON_TURN, THOUGHT + THOUGHT + FINAL.format(GOOD), True),
    (JSON_TURN, THOUGHT + FINAL.format(BAD), False),
    (JSON_TURN, THOUGHT + FINAL.format(GOOD + " so"), False),
    (JSON_TURN, PREAMBLE + FINAL.format(GOOD), False),
    (JSON_TURN, THOUGHT + CALL.format("f", GOOD), False),
    (JSON_TURN, "<|channel|>final<|message|>" + GOOD + "<|call|>", False),
    (JSON_TURN, "<|channel|>other<|message|>" + GOOD + "<|return|>", False),
    (MUST_CALL, THOUGHT + CALL.format("f", GOOD), True),
    (MUST_CALL, THOUGHT + PREAMBLE + CALL.format("g", GOOD), True),
    (MUST_CALL, THOUGHT + THOUGHT + PREAMBLE + CALL.format("g", GOOD), False),
    (MAY_CALL, THOUGHT + PREAMBLE + THOUGHT + PREAMBLE + CALL.format("g", GOOD), True),
    (MUST_CALL, CALL.format("f", GOOD).replace(" <|constrain|>json", ""), True),
    (MUST_CALL, CALL.format("f", GOOD).replace(" <|constrain|>", " "), True),
    (MUST_CALL, " to=functions.f<|channel|>commentary<|constrain|>json<|message|>" + GOOD + "<|call|>", True),
    (MUST_CALL, CALL.format("h", GOOD), False),
    (MUST_CALL, CALL.format("f", BAD), False),
    (MUST_CALL, CALL.format("f", GOOD).replace("functions.", ""), False),
    (MUST_CALL, THOUGHT + FINAL.format("no"), False),
    (MAY_CALL, THOUGHT + FINAL.format("any text {"), True),
    (MAY_CALL, CALL.format("f", GOOD), True),
    (MAY_CALL, CALL.format("f", BAD), False),
    (MAY_CALL | JSON_TURN, FINAL.format(GOOD), True),
    (MAY_CALL | JSON_TURN, FINAL.format("text"), False),
    ({}, THOUGHT + PREAMBLE + FINAL.format("text"), True),
    ({}, CALL.format("f", GOOD), False),
]


@rows("rules, transcript, is_allowed", *HARMONY_TURNS)
def test_harmony_turns(harmony, rules, transcript, is_allowed):
    turn = turn_of(harmony, rules, "<|start|>user<|message|>hi<|end|><|start|>assistant")
    assert harmony.allows(turn, transcript) is is_allowed


@rows(
    "opened, transcript, is_allowed",
    ("<|channel|>analysis<|message|>", "So.<|end|><|start|>assistant" + FINAL.format(GOOD), True),
    ("<|channel|>analysis<|message|>", FINAL.format(GOOD), False),
    ("<|channel|>final<|message|>", GOOD + "<|return|>", True),
    ("<|channel|>final<|message|>Here: ", GOOD + "<|return|>", True),
    ("<|channel|>final<|message|>Here: ", BAD + "<|return|>", False),
)
def test_harmony_goes_on_where_the_prompt_ends(harmony, opened, transcript, is_allowed):
    turn = turn_of(harmony, JSON_TURN, "<|start|>assistant" + opened)
    assert harmony.allows(turn, transcript) is is_allowed


def test_harmony_has_no_rules_for_a_prompt_that_ends_elsewhere(harmony):
    assert turn_of(harmony, JSON_TURN, "<|start|>user<|message|>hi") is None
    assert turn_of(harmony, MUST_CALL, "<|start|>assistant<|channel|>final<|message|>Here: ") is None


BLOCK = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
BARE = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
IN_CALLS = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
THINKS = "{a} so</think>"
DEEPSEEK_TURNS = [
    (JSON_TURN, "R1", "<think>\n", THINKS + "\n\n" + GOOD, True),
    (JSON_TURN, "R1", "<think>\n", THINKS + BAD, False),
    (JSON_TURN, "R1", "<think>\n", GOOD, False),
    (JSON_TURN, "V3.1", "</think>", GOOD, True),
    (JSON_TURN, "V3.1", "</think>", THINKS + GOOD, False),
    (JSON_TURN, "R1", "<｜Assistant｜>", "<think>" + THINKS + GOOD, True),
    (JSON_TURN, "R1", "<｜Assistant｜>", GOOD, True),
    (JSON_TURN, "R1", "<｜Assistant｜>", "<think>" + THINKS + "\n\n" + GOOD, True),
    (JSON_TURN, "R1", "<｜Assistant｜>", "\n" + GOOD, False),
    (JSON_TURN, "V3.1", "</think>", "\n\n" + GOOD, False),
    (JSON_TURN, "V3.1", "</think>\n", "\n" + GOOD, False),
    (JSON_TURN, "V3.1", "</think>Here: ", "\n" + GOOD, False),
    (JSON_TURN, "V3.1", "</think>Here: ", GOOD, True),
    (JSON_TURN, "V3.1", "</think>Here: ", "<think>" + THINKS + GOOD, False),
    (JSON_TURN, "R1", "Here: ", GOOD, True),
    (JSON_TURN, "R1", "Here: ", "<think>" + THINKS + GOOD, False),
    (MUST_CALL, "V3.1", "</think>I look.", IN_CALLS.format(BARE.format("f", GOOD)), True),
    (MUST_CALL, "V3.1", "</think>I look.", "<think>" + THINKS + IN_CALLS.format(BARE.format("f", GOOD)), False),
    (MAY_CALL | JSON_TURN, "R1", "<think>", THINKS + "\n\n" + IN_CALLS.format(BLOCK.format("f", GOOD)), True),
    (MAY_CALL | JSON_TURN, "V3.1", "</think>", IN_CALLS.format(BARE.format("f", GOOD)), True),
    (MAY_CALL | JSON_TURN, "V3.1", "</think>", "\n" + IN_CALLS.format(BARE.format("f", GOOD)), False),
    (MUST_CALL, "R1", "<think>", THINKS + "\n\n" + IN_CALLS.format(BLOCK.format("f", GOOD)), True),
    (MUST_CALL, "R1", "<think>", THINKS + "I look." + IN_CALLS.format(BLOCK.format("f", GOOD)), False),
    (MUST_CALL, "V3.1", "</think>", "I look." + IN_CALLS.format(BARE.format("f", GOOD)), False),
    (MUST_CALL, "V3.1", "</think>", "\n" + IN_CALLS.format(BARE.format("f", GOOD)), False),
    (MUST_CALL, "V3.1", "<｜tool▁output▁end｜>", IN_CALLS.format(BARE.format("f", GOOD)), True),
    (MUST_CALL, "V3.1", "<｜tool▁output▁end｜>", "So." + IN_CALLS.format(BARE.format("f", GOOD)), False),
    (MUST_CALL, "V3.1", "<｜tool▁output▁end｜>", "<think>" + THINKS + IN_CALLS.format(BARE.format("f", GOOD)), True),
    (MUST_CALL | JSON_TURN, "V3.1", "</think>", GOOD, False),
    (MUST_CALL, "R1", "<think>", THINKS + IN_CALLS.format(BARE.format("f", GOOD)), False),
    (MUST_CALL, "R1", "<think>", THINKS + IN_CALLS.format(BLOCK.format("f", BAD)), False),
    (MUST_CALL, "R1", "<think>", THINKS + "text", False),
    (MUST_CALL, "V3.1", "</think>", IN_CALLS.format(BARE.format("g", GOOD) * 2), True),
    (MUST_CALL, "V3.1", "</think>", IN_CALLS.format(BARE.format("h", GOOD)), False),
    (MUST_CALL, "V3.1", "</think>", IN_CALLS.format(""), False),
    (MUST_CALL | {"is_parallel": False}, "V3.1", "</think>", IN_CALLS.format(BARE.format("f", GOOD)), True),
    (MUST_CALL | {"is_parallel": False}, "V3.1", "</think>", IN_CALLS.format(BARE.format("f", GOOD) * 2), False),
    (MAY_CALL, "V3.1", "</think>", "any text", True),
    (MAY_CALL, "V3.1", "</think>", "I look." + IN_CALLS.format(BARE.format("f", GOOD) * 2), True),
    (MAY_CALL, "R1", "<think>", THINKS + "\n\nI look.\n" + IN_CALLS.format(BLOCK.format("f", GOOD)), True),
    (MAY_CALL | JSON_TURN, "V3.1", "</think>", "any text", False),
    ({}, "V3.1", "</think>", "any text", True),
    ({}, "V3.1", "</think>", IN_CALLS.format(BARE.format("f", GOOD)), False),
]


@rows("rules, template, opened, transcript, is_allowed", *DEEPSEEK_TURNS)
def test_deepseek_turns(deepseek, rules, template, opened, transcript, is_allowed):
    turn = turn_of(deepseek, rules, "<｜User｜>hi<｜Assistant｜>" + opened, TEMPLATES[template])
    assert deepseek.allows(turn, transcript) is is_allowed


@rows("default, tool_use, spells_blocks", ("R1", "V3.1", False), ("V3.1", "R1", True), ("R1", None, True))
def test_calls_are_spelled_as_the_template_that_renders_tools_does(deepseek, default, tool_use, spells_blocks):
    tokenizer = ByteTokenizer()
    tokenizer.named_tokens = {}
    tokenizer.chat_template, tokenizer.tool_template = (
        None if name is None else TemplateText(TEMPLATES[name], name) for name in (default, tool_use)
    )
    converter = Converter(tokenizer, ServerConfig(), SamplingDefaults())
    grammar = converter.turn_grammar(TurnRules(param="tools", **MUST_CALL), tokenizer.encode("</think>"))
    turn = json.loads(grammar.format_json)
    for call, is_allowed in ((BLOCK, spells_blocks), (BARE, not spells_blocks)):
        assert deepseek.allows(turn, IN_CALLS.format(call.format("f", GOOD))) is is_allowed


@rows("prompt", "<think>\n", "</think>", "</think>\n", "</think>Well, ", "<｜Assistant｜>", "<｜tool▁output▁end｜>")
def test_content_is_the_answer_without_line_breaks_around_it(deepseek, prompt):
    """Line breaks after a `</think>` of the prompt were allowed and not dropped."""
    turn = turn_of(deepseek, {"answer": regex("yes|no")}, prompt)
    for seed in range(20):
        ids = deepseek.random_turn(turn, seed)
        parser = choose_parser(deepseek.tokenizer)(deepseek.tokenizer.encode(prompt), frozenset())
        _, content, calls = answer_of(parser, ids)
        assert (content in ("yes", "no"), calls) == (True, []), content


@rows("prompt, template", ("<think>", "R1"), ("</think>", "V3.1"))
def test_whatever_a_deepseek_model_writes_is_a_call(deepseek, prompt, template):
    """A model that chooses at random among the tokens allowed."""
    turn = turn_of(deepseek, MUST_CALL, prompt, TEMPLATES[template])
    _check_calls(deepseek, turn, prompt)


def test_whatever_a_gpt_oss_model_writes_is_a_call(harmony):
    _check_calls(harmony, turn_of(harmony, MUST_CALL, "<|start|>assistant"), "<|start|>assistant")


def _check_calls(compiler, turn, prompt):
    found = 0
    for seed in range(30):
        ids = compiler.random_turn(turn, seed)
        if ids is None:
            continue
        parser = choose_parser(compiler.tokenizer)(compiler.tokenizer.encode(prompt), frozenset("fg"))
        _, _, calls = answer_of(parser, ids)
        assert calls
        for name, text_of_arguments in calls:
            assert name in ("f", "g")
            assert type(json.loads(text_of_arguments)["a"]) is int
        found += 1
    assert found >= 5


def test_control_tokens_stay_out_of_free_text_in_every_loop(harmony):
    """Inside xgrammar's `repeat`, tokens were not excluded."""
    end, start = (harmony.tokenizer.special_tokens[name] for name in ("<|end|>", "<|start|>"))
    for low, high in ((0, None), (1, None), (0, 1)):
        turn = sequence(repeated(sequence(free_tokens([end, start]), token(end)), low, high), text("x"))
        assert harmony.allows(turn, "some text<|end|>x")
        assert not harmony.allows(turn, "some<|start|>text<|end|>x")
