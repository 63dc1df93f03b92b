"""Nothing that a client sends is missing from the prompt: the bundled template, and ones with the published gaps."""

import copy
import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.chat_templates import TemplateText
from loaders.tokenizer import load_tokenizer
from server.config import ServerConfig
from server.convert import Converter
from server.errors import BadRequest
from server.folding import Folding, all_foldings, fold
from server.prompt import ChatTemplate
from server.rehearsal import Rehearsal, condensed, shape_of
from server.sampling_defaults import SamplingDefaults
from server.schema.chat import ChatCompletionRequest
from server.schema.completions import TokenizeRequest
from server.template_environment import TemplateEnvironment
from tests.server.conftest import ASSETS, WEATHER, FakeEngine
from tests.tables import rows

FOLDER = Path(__file__).parent / "templates"
INFO = FakeEngine().info
TOKENIZER = load_tokenizer(ASSETS)
# A template for which no folding helps: it has no place for tool results, and reads system messages only at the end.
WITHOUT_TOOLS = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}[{{ m.content }}]{% endif %}{% endfor %}"
)


def converter_of(template):
    """A converter of the bundled model with another chat template."""
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.chat_template = TemplateText(template, "chat_template.jinja")
    return Converter(tokenizer, ServerConfig(), SamplingDefaults())


def published(name):
    return converter_of((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))


CONVERTERS = {
    "bundled": converter_of(TOKENIZER.chat_template.text),
    "gpt_oss": published("gpt_oss"),
    "deepseek_r1": published("deepseek_r1"),
    "deepseek_v31": published("deepseek_v31"),
    "without_tools": converter_of(WITHOUT_TOOLS),
}
PUBLISHED = ["gpt_oss", "deepseek_r1", "deepseek_v31"]


def prompt(name, messages, **fields):
    converter = CONVERTERS[name]
    prepared = converter.chat(ChatCompletionRequest(messages=messages, **fields), INFO, "id")
    return TOKENIZER.decode(prepared.requests[0].prompt_ids)


def call(call_id, name="get_weather", arguments='{"city": "Paris"}'):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id, content="sunny"):
    return {"role": "tool", "tool_call_id": call_id, "content": content}


USER = {"role": "user", "content": "What is the weather?"}
ANSWER = {"role": "assistant", "content": "Sunny."}
SYSTEM_A, SYSTEM_B = ({"role": "system", "content": f"rule-{letter}"} for letter in "AB")
DEVELOPER = {"role": "developer", "content": "rule-D"}


@st.composite
def conversations(draw):
    """Messages with a marker word in every part, and the markers that have to be in the prompt."""
    words = (f"word{number}x" for number in itertools.count(1))
    ids = (f"call_{number}" for number in itertools.count(1))
    messages, markers = [], []

    def mark():
        markers.append(next(words))
        return markers[-1]

    for role in draw(st.lists(st.sampled_from(["system", "developer", "user", "assistant"]), min_size=1, max_size=7)):
        if role != "assistant":
            messages.append({"role": role, "content": mark()})
            continue
        calls = [call(next(ids), mark(), json.dumps({mark(): 1})) for _ in range(draw(st.integers(0, 3)))]
        message = {"role": role, "content": draw(st.sampled_from([None, "", " "]))}
        if not calls or draw(st.booleans()):
            message["content"] = mark()
        if draw(st.booleans()):
            message["reasoning"] = next(words)
        messages.append({**message, "tool_calls": calls} if calls else message)
        answered = draw(st.permutations(calls))[: draw(st.integers(0, len(calls)))]
        if calls and draw(st.booleans()):
            messages.append({"role": "user", "content": mark()})
        messages += [result(one["id"], mark()) for one in answered]
    return messages, markers


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(sorted(CONVERTERS)), conversations(), st.booleans())
def test_every_part_is_in_the_prompt_or_named_in_a_refusal_g22(name, conversation, has_tools):
    messages, markers = conversation
    fields = {"tools": [WEATHER]} if has_tools else {}
    has_calls = any("tool_calls" in message for message in messages)
    if (name == "deepseek_r1" and has_tools) or (name == "without_tools" and (has_tools or has_calls)):
        with pytest.raises(BadRequest, match=r"^(messages\[\d+\]\.tool_calls\[\d+\]|messages\[\d+\]\.content|tools): "):
            prompt(name, messages, **fields)
        return
    text = prompt(name, messages, **fields)
    assert not [word for word in markers if word not in text]
    assert not has_tools or "get_weather" in text


@rows(
    "messages",
    [SYSTEM_A, SYSTEM_B, USER],
    [USER, ANSWER, SYSTEM_A, USER],
    [DEVELOPER, USER],
    [SYSTEM_A, DEVELOPER, USER],
    [USER, ANSWER, DEVELOPER],
)
@rows("name", "bundled", *PUBLISHED)
def test_instructions_stay_g22(messages, name):
    text = prompt(name, messages)
    assert all(message["content"] in text for message in messages)


@rows("ids", ("c1", "c2"), ("c2", "c1"))
@rows("between", [], [{"role": "user", "content": "Wait."}])
def test_calls_and_results_are_paired_where_a_message_holds_one_call_g23(ids, between):
    calls = [call("c1", "get_weather", '{"a": 1}'), call("c2", "get_time", '{"b": 2}')]
    results = [result(call_id, f"result of {call_id}") for call_id in ids]
    text = prompt("gpt_oss", [USER, {"role": "assistant", "tool_calls": calls}, *between, *results])
    parts = [
        'to=functions.get_weather<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"result of c1"<|end|>',
        'to=functions.get_time<|channel|>commentary json<|message|>{"b": 2}<|call|>',
        '<|start|>functions.get_time to=assistant<|channel|>commentary<|message|>"result of c2"<|end|>',
    ]
    positions = [text.index(part) for part in parts]
    assert positions == sorted(positions)


def test_results_stand_in_the_order_of_their_calls_g23():
    """DeepSeek's templates name no call in a result: only the order tells."""
    turn = {"role": "assistant", "content": "", "tool_calls": [call("c1"), call("c2", "get_time")]}
    for name in ("deepseek_r1", "deepseek_v31"):
        in_order = prompt(name, [USER, turn, result("c1", "one"), result("c2", "two")])
        assert in_order == prompt(name, [USER, turn, result("c2", "two"), result("c1", "one")])


def test_folding_and_the_bundled_template_read_a_message_a_constant_number_of_times_g80(monkeypatch):
    """Results looked for their call in all messages before: 9,000 calls kept other large bodies waiting for minutes."""
    num_read = 0

    def read(environment, value, name):
        nonlocal num_read
        num_read += 1
        return getattr_of(environment, value, name)

    class Message(dict):
        def __getitem__(self, key):
            nonlocal num_read
            num_read += 1
            return super().__getitem__(key)

        def get(self, key, default=None):
            nonlocal num_read
            num_read += 1
            return super().get(key, default)

    getattr_of = TemplateEnvironment.getattr
    monkeypatch.setattr(TemplateEnvironment, "getattr", read)
    template = ChatTemplate(TOKENIZER)
    counts = []
    for num_calls in (40, 80):
        ids = [f"c{i}" for i in range(num_calls)]
        calls = [{"id": i, "function": {"name": "f", "arguments": "{}"}} for i in ids]
        results = [Message(result(i, "r")) for i in reversed(ids)]
        messages = [Message(USER), Message(role="assistant", content="", tool_calls=calls), *results] * 2
        num_read = 0
        for folding in (Folding(), Folding(split_calls=True)):
            template.text(messages=fold(messages, folding))
        counts.append(num_read)
    assert counts[1] < 2.2 * counts[0]


def test_repeated_call_ids_keep_their_results_g23():
    first = {"role": "assistant", "tool_calls": [call("c", "f"), call("c", "g")]}
    messages = [USER, first, result("c", "of f"), result("c", "of g"), ANSWER, USER, first, result("c", "late")]
    text = prompt("gpt_oss", messages)
    assert 'functions.f to=assistant<|channel|>commentary<|message|>"of f"' in text
    assert 'functions.g to=assistant<|channel|>commentary<|message|>"of g"' in text
    assert 'functions.f to=assistant<|channel|>commentary<|message|>"late"' in text


@rows("name", "bundled", *PUBLISHED)
def test_missing_null_and_empty_content_next_to_calls_are_one_g24(name):
    forms = [{}, *({"content": content} for content in (None, "", [], " ", "\n\n"))]
    prompts = {
        prompt(name, [USER, {"role": "assistant", "tool_calls": [call("c1")], **form}, result("c1")]) for form in forms
    }
    [text] = prompts
    assert "get_weather" in text
    assert '{"city": "Paris"}' in text


@rows("later", [], [ANSWER, USER])
@rows("name", "bundled", *PUBLISHED)
def test_text_and_calls_of_one_message_both_stay_g24(later, name):
    message = {"role": "assistant", "content": "I look it up.", "reasoning": "Hm.", "tool_calls": [call("c1")]}
    text = prompt(name, [USER, message, result("c1"), *later])
    assert text.index("I look it up.") < text.index('{"city": "Paris"}')


def test_reasoning_of_the_current_turn_stays_beside_a_preamble_g24():
    first = {"role": "assistant", "content": "One.", "reasoning": "thought-1", "tool_calls": [call("c1")]}
    second = {"role": "assistant", "content": "Two.", "reasoning": "thought-2", "tool_calls": [call("c2")]}
    turn = [USER, first, result("c1"), second, result("c2")]
    for name in ("bundled", "gpt_oss"):
        text = prompt(name, turn)
        assert all(word in text for word in ("thought-1", "One.", "thought-2", "Two."))
        assert "thought-1" not in prompt(name, [*turn, ANSWER, USER])
        finished = [USER, {"role": "assistant", "content": "Zero.", "tool_calls": [call("c0")]}, result("c0"), ANSWER]
        text = prompt(name, [*finished, *turn])
        assert all(word in text for word in ("Zero.", "thought-1", "One.", "thought-2", "Two."))


SCHEMAS = [
    {"type": "integer", "enum": [1, 2], "default": 1},
    True,
    False,
    {"oneOf": [{"type": "string"}, {"type": "integer"}], "default": 5},
    {"type": "string", "enum": ["a", None], "default": None},
    {"type": "boolean", "enum": [True], "default": True},
    {"type": "array", "items": True, "default": []},
    {"oneOf": [True, {"type": "object", "properties": {"x": False}}], "default": {"x": 1}},
    {},
]


@rows("name", "bundled", "gpt_oss", "deepseek_v31")
@rows("schema", *SCHEMAS)
def test_schemas_of_any_kind_render_g25(name, schema):
    parameters = {"type": "object", "properties": {"marker_word": schema}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    text = prompt(name, [USER], tools=[tool])
    assert "marker_word" in text
    if name == "deepseek_v31":
        assert '"additionalProperties": false' in text


def test_defaults_are_written_as_json_g25():
    properties = {f"p{i}": schema for i, schema in enumerate(SCHEMAS[:5])}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    text = prompt("gpt_oss", [USER], tools=[tool])
    assert [line.partition("default: ")[2] for line in text.splitlines() if "default" in line] == ["1,", "5,", "null,"]


@rows(
    "parameters, reason",
    ({"type": "object", "properties": {"a": {"type": "string"}}, "required": True}, "iterable"),
    ({"type": "object", "properties": [1]}, "items"),
)
def test_a_schema_that_the_template_cannot_read_is_named_g25(parameters, reason):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for name in ("bundled", "gpt_oss"):
        with pytest.raises(BadRequest, match=reason) as caught:
            prompt(name, [USER], tools=[tool])
        assert caught.value.param == "tools"
        assert caught.value.message.startswith("tools: ")


def test_what_has_no_place_in_a_template_is_named_g22():
    turn = [USER, {"role": "assistant", "tool_calls": [call("c1")]}, result("c1")]
    with pytest.raises(BadRequest, match="leaves it out") as caught:
        prompt("without_tools", turn)
    assert caught.value.param == "messages[1].tool_calls[0]"
    assert "rule-A\n\nrule-D\n\nWhat is" in prompt("without_tools", [SYSTEM_A, USER, DEVELOPER])


@rows("name", *PUBLISHED)
def test_a_long_conversation_is_searched_in_a_short_one(name, monkeypatch):
    """Every folding of a thousand messages would take a minute."""
    turn = [USER]
    for number in range(60):
        calls = [call(f"{number}a"), call(f"{number}b", "get_time")]
        turn.append({"role": "assistant", "content": f"preamble {number}.", "tool_calls": calls})
        turn += [result(f"{number}b", f"second {number}."), result(f"{number}a", f"first {number}.")]
    messages = [SYSTEM_A, DEVELOPER, *turn, ANSWER, *turn]
    converter = CONVERTERS[name]
    sizes = []
    render = converter._template.text
    monkeypatch.setattr(
        converter._template, "text", lambda **data: sizes.append(len(data["messages"])) or render(**data)
    )
    text = TOKENIZER.decode(converter.tokenize(TokenizeRequest(messages=messages), None))
    assert sum(size > 200 for size in sizes) == 2  # the rehearsal and the prompt
    for number in range(60):
        assert text.count(f"preamble {number}.") == 2
        assert text.count(f"first {number}.") == text.count(f"second {number}.") == 2
    assert all(words in text for words in ("rule-A", "rule-D"))


def test_only_short_conversations_are_remembered():
    """Otherwise a client could fill the memory with shapes and template variables."""
    rehearsal = Rehearsal(ChatTemplate(CONVERTERS["gpt_oss"].tokenizer))
    plain = [{"role": "user", "content": "x"}]
    rehearsal.folding_for(plain, {}, has_tools=False)
    rehearsal.folding_for(plain, {}, has_tools=False)
    assert rehearsal._folding_of.cache_info().currsize == 1
    rehearsal.folding_for(plain * 129, {}, has_tools=False)
    rehearsal.folding_for(plain, {"reasoning_effort": "x" * 300}, has_tools=False)
    assert rehearsal._folding_of.cache_info().currsize == 1


def test_a_condensed_conversation_is_short_whatever_the_long_one():
    rng = random.Random(1)
    messages = []
    for number in range(400):
        calls = [call(f"{number}-{i}") for i in range(rng.randint(0, 30))]
        messages.append({"role": "assistant", "content": "x" * rng.randint(0, 1), "tool_calls": calls})
        messages += [result(one["id"], "y" * rng.randint(0, 1)) for one in calls if rng.random() < 0.5]
    short = condensed(shape_of(messages))
    assert 10 < sum(1 + len(message.call_ids) for message in short) <= 128
    assert condensed(shape_of(messages[:3])) == shape_of(messages[:3])


def test_foldings_change_nothing_first():
    first, *others = all_foldings()
    assert first == type(first)()
    assert first not in others
