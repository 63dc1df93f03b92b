"""The chat template: training renders through it, transformers renders the same, every Harmony rule holds."""

import json
import random

import pytest

from tests.tables import rows
from tools.tiny_models.data.mix import draw
from tools.tiny_models.families.gpt_oss.dialect import ASSETS, DIALECT

render = DIALECT.render
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city"},
                "days": {"type": "integer", "default": 3},
                "unit": {"type": "string", "enum": ["c", "f"]},
                "tags": {"type": "array", "items": {"type": ["string", "null"]}},
                "where": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
                "either": {"anyOf": [{"type": "string"}, {"type": "boolean"}]},
            },
            "required": ["city"],
        },
    },
}
SYSTEM = (
    "<|start|>system<|message|>You are moe-serve's tiny bundled model.\nReasoning: medium\n"
    "# Valid channels: analysis, final.<|end|>"
)


def call(arguments: object, **extra: object) -> dict:
    function = {"name": "get_weather", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}], **extra}


def test_a_plain_question_with_a_date_only_when_given() -> None:
    text = render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert text == SYSTEM + "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    messages = [{"role": "user", "content": "Hi"}]
    assert "Current date" not in render(messages)
    assert "Current date: 2025-01-02\n" in render(messages, current_date="2025-01-02")


@rows("effort", "low", "medium", "high")
def test_reasoning_effort(effort: str) -> None:
    assert f"Reasoning: {effort}\n" in render([{"role": "user", "content": "Hi"}], reasoning_effort=effort)


def test_system_messages_become_instructions_and_parts_are_joined() -> None:
    text = render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|><|start|>user" in text
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert "<|message|>Hello<|end|>" in render([{"role": "user", "content": parts}])


def test_tools_become_a_namespace_and_open_the_commentary_channel() -> None:
    text = render([{"role": "user", "content": "Hi"}], tools=[WEATHER])
    assert "# Valid channels: analysis, commentary, final." in text
    assert (
        "namespace functions {\n\n// Get the weather.\ntype get_weather = (_: {\n// The city\ncity: string,\n"
        'days?: number, // default: 3\nunit?: "c" | "f",\ntags?: (string | null)[],\nwhere?: {\nlat: number,\n},\n'
        "either?: string | boolean,\n}) => any;\n\n} // namespace functions<|end|>"
    ) in text
    assert "commentary" not in render([{"role": "user", "content": "Hi"}])


@rows("arguments", '{"city": "Paris"}', {"city": "Paris"})
def test_arguments_are_not_encoded_twice(arguments: object) -> None:
    text = render([{"role": "user", "content": "Hi"}, call(arguments)], tools=[WEATHER])
    wanted = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
    assert text.endswith("<|start|>assistant" + wanted)


def test_a_result_names_its_function_and_its_call_keeps_the_thought() -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        call("{}", reasoning="Look it up."),
        {"role": "tool", "tool_call_id": "c1", "content": "21"},
    ]
    text = render(messages, tools=[WEATHER], add_generation_prompt=True)
    assert "<|channel|>analysis<|message|>Look it up.<|end|>" in text
    assert text.endswith(
        "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>21<|end|><|start|>assistant"
    )


def test_a_result_needs_a_call_and_means_the_latest_of_its_id() -> None:
    other = {"id": "c1", "type": "function", "function": {"name": "later", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "1"}
    again = {"role": "assistant", "tool_calls": [other]}
    text = render([{"role": "user", "content": "Hi"}, call("{}"), result, again, result])
    assert text.index("<|start|>functions.get_weather") < text.index("<|start|>functions.later")
    with pytest.raises(ValueError, match="tool call"):
        render([{"role": "tool", "tool_call_id": "x", "content": "1"}])


@rows("key", "reasoning", "reasoning_content", "thinking")
def test_thoughts_of_finished_turns_are_dropped(key: str) -> None:
    done = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B", key: "hm"}]
    assert "<|channel|>analysis<|message|>hm<|end|>" in render(done)
    assert render(done).endswith("<|channel|>final<|message|>B<|return|>")
    later = render([*done, {"role": "user", "content": "C"}], add_generation_prompt=True)
    assert "hm" not in later
    assert "<|channel|>final<|message|>B<|end|>" in later


def test_training_text_is_the_prompt_and_its_continuation() -> None:
    rng = random.Random(3)
    encoder = DIALECT.encoder()
    for _ in range(300):
        example = draw(rng)
        prompt, target = DIALECT.prompt_and_target(example)
        assert prompt == DIALECT.prompt(example)
        assert target.endswith(("<|return|>", "<|call|>"))
        ids, length = encoder.example(example)
        assert encoder.decode(ids[:length]) == prompt


def test_transformers_renders_and_encodes_the_same() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ASSETS)
    rng = random.Random(4)
    encoder = DIALECT.encoder()
    for _ in range(100):
        example = draw(rng)
        theirs = tokenizer.apply_chat_template(
            example.messages[:-1], tools=example.tools, add_generation_prompt=True, tokenize=False,
            reasoning_effort=example.effort,
        )  # fmt: skip
        assert theirs == DIALECT.prompt(example)
        assert tokenizer(theirs).input_ids == encoder.text(theirs)


def test_special_tokens_and_stop_ids() -> None:
    config = json.loads((ASSETS / "generation_config.json").read_text())
    vocabulary = json.loads((ASSETS / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in vocabulary}
    assert {ids["<|return|>"], ids["<|call|>"]} <= set(config["eos_token_id"])
    assert max(ids.values()) == 4095
