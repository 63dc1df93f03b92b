"""The template of the DeepSeek family: as transformers renders it, as training cuts it, as the server reads answers."""

import random

import pytest
from transformers import AutoTokenizer

from loaders.tokenizer import load_tokenizer
from server.parsers.base import Kind
from server.parsers.deepseek import DeepSeekParser
from server.prompt import ChatTemplate
from tests.tables import rows
from tools.tiny_models.data.gen_tools import call_message, domain_call
from tools.tiny_models.data.mix import draw
from tools.tiny_models.families.deepseek_v3.dialect import BOS, DIALECT, EOS, FILES

HI = {"role": "user", "content": "Hi"}
CALL = call_message(domain_call(random.Random(1)), thinks=True)
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "21"}


@rows(
    "variables, mark",
    ({}, "</think>"),
    ({"thinking": False}, "</think>"),
    ({"thinking": True}, "<think>"),
    ({"reasoning_effort": "low"}, "</think>"),
    ({"reasoning_effort": "high"}, "<think>"),
    ({"reasoning_effort": "high", "thinking": False}, "</think>"),
)
def test_thinking_is_a_variable_and_off_by_default(variables: dict, mark: str) -> None:
    assert DIALECT.render([HI], True, **variables) == f"{BOS}<｜User｜>Hi<｜Assistant｜>{mark}"


def test_system_and_developer_messages_and_tools_come_first() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    messages = [{"role": "system", "content": "A"}, HI, {"role": "developer", "content": "B"}]
    wanted = (
        f"{BOS}A\n\nB\n\n## Tools\nYou have access to the following tools:\n\n### f\nDescription: \n\n"
        'Parameters: {"type": "object"}\n<｜User｜>Hi'
    )
    assert DIALECT.render(messages, tools=[tool]) == wanted


def test_a_call_and_its_result_are_one_turn_and_thoughts_are_dropped() -> None:
    function = CALL["tool_calls"][0]["function"]
    text = DIALECT.render([HI, CALL, RESULT], True, thinking=True)
    assert text == (
        f"{BOS}<｜User｜>Hi<｜Assistant｜></think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{function['name']}<｜tool▁sep｜>"
        f"{function['arguments']}<｜tool▁call▁end｜><｜tool▁calls▁end｜>{EOS}"
        "<｜tool▁output▁begin｜>21<｜tool▁output▁end｜>"
    )


def test_unknown_roles_and_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="role critic: it must be"):
        DIALECT.render([{"role": "critic", "content": "x"}])
    with pytest.raises(ValueError, match="only text parts"):
        DIALECT.render([{"role": "user", "content": [{"type": "image_url"}]}])


def test_training_text_is_the_prompt_and_the_templates_own_continuation() -> None:
    rng = random.Random(3)
    modes = set()
    for _ in range(200):
        example = DIALECT.adapted(rng, draw(rng))
        prompt, target = DIALECT.prompt_and_target(example)
        modes.add(prompt.rpartition("<｜Assistant｜>")[2] if prompt.endswith("think>") else "result")
        full = DIALECT.render(example.messages, **DIALECT.variables(example))
        thoughtless = target.rpartition("</think>")[2]
        assert prompt.removesuffix("<think>").removesuffix("</think>").removesuffix("<｜Assistant｜>") in full
        assert full.endswith(thoughtless)
        assert ("</think>" in target) == prompt.endswith("<think>")
    assert modes == {"<think>", "</think>", "result"}


def test_transformers_and_the_server_render_and_encode_the_same() -> None:
    tokenizer, ours = AutoTokenizer.from_pretrained(FILES), load_tokenizer(FILES)
    template, encoder, rng = ChatTemplate(ours), DIALECT.encoder(), random.Random(4)
    for _ in range(40):
        example = DIALECT.adapted(rng, draw(rng))
        variables, ids = DIALECT.variables(example), encoder.text(DIALECT.prompt(example))
        tools, messages = variables.pop("tools"), example.messages[:-1]
        theirs = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False, **variables
        )
        assert theirs == ids
        assert template.render(messages, tools or (), variables) == ids


def test_the_server_reads_what_training_teaches() -> None:
    ours, encoder, rng = load_tokenizer(FILES), DIALECT.encoder(), random.Random(5)
    num_calls = 0
    for _ in range(150):
        example = DIALECT.adapted(rng, draw(rng))
        ids, cut = encoder.example(example)
        names = frozenset(tool["function"]["name"] for tool in example.tools or ())
        parser = DeepSeekParser(ours, ids[:cut], names)
        events = [event for token in ids[cut:] for event in parser.feed(token)] + parser.finish()
        text = {kind: b"".join(e.data for e in events if e.kind is kind).decode() for kind in Kind}
        content, calls = DIALECT.read(encoder.decode(ids[cut:]))
        assert text[Kind.CONTENT] == content
        assert text[Kind.TOOL_CALL] == "".join(arguments for _, arguments in calls)
        assert [e.name for e in events if e.name] == [name for name, _ in calls]
        num_calls += len(calls)
    assert num_calls > 10


def test_special_tokens_stand_where_deepseek_has_them() -> None:
    ids = load_tokenizer(FILES).special_tokens
    assert (ids[BOS], ids[EOS], ids["<｜▁pad▁｜>"]) == (0, 1, 2)
    assert max(ids.values()) == 1535
