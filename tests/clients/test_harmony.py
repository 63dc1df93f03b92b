"""Prompts and answers in the Harmony format, beside OpenAI's own library for it.

GPT-OSS is served with the chat template of its checkpoint, which differs from the library in a few places: the tables
below list them. A difference that is not listed fails the test.
"""

import json
import re
import subprocess
from itertools import product

import pytest

from server.parsers import Kind, choose_parser
from server.schema.chat import ChatCompletionRequest
from tests.clients.conftest import HERE, client_program
from tests.server.test_templates import CONVERTERS, INFO, TOKENIZER
from tests.tables import rows

DATE = "2026-01-02"
NOW = {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}}
PLACE = {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}}, "required": ["lat"]}
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Its name"},
            "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
            "days": {"type": "array", "items": {"type": "integer"}},
            "place": PLACE,
            "note": {"type": ["string", "null"]},
            "wind": {"oneOf": [{"type": "string"}, {"type": "number"}]},
            "exact": {"type": "boolean", "default": True},
        },
        "required": ["city"],
    },
}
FIRST = [{"role": "user", "content": "Weather in “Paris”?"}]
CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
CALLED = [
    *FIRST,
    {"role": "assistant", "reasoning": "I need a call.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "name": "get_weather", "content": '{"is": "18 °C"}'},
]
ANSWERED = [*CALLED, {"role": "assistant", "reasoning": "Now I know.", "content": "18 °C."}, *FIRST]
TALKED = [*FIRST, {"role": "assistant", "reasoning": "Simple.", "content": "Sunny."}, *FIRST]
HEADS = ([], [{"role": "system", "content": "Be short.\n\nBe kind."}], [{"role": "developer", "content": "Be short."}])
CASES = [
    {"messages": [*head, *talk], "tools": tools, "date": DATE, "effort": effort}
    for (tools, talks), head, effort in product(
        (([], (FIRST, TALKED)), ([WEATHER, NOW], (FIRST, TALKED, CALLED, ANSWERED)), ([NOW, WEATHER], (FIRST, CALLED))),
        HEADS,
        ("low", "high"),
    )
    for talk in talks
]
# How a template writes what the library writes otherwise.
ONE_LINE = (r":\n \| (.*)\n \| (.*)\n,", r": \1 | \2,")  # of a union
NO_ARGUMENTS = (r"\(_: \{\n\}\)", "()")
DIFFERENCES = {
    "gpt_oss": [
        ONE_LINE,
        NO_ARGUMENTS,
        (r"(// default: .*)", r"\1,"),
        (r"\n    (\w+\??: .*),", r"\n\1"),  # parts of an object inside an object
        (r"\n    }", "\n}"),
        (r"(# Instructions\n\n(?:(?!# Tools|<\|end\|>)[\s\S])*)<\|end\|>", r"\1\n\n<|end|>"),
        (r"commentary <\|constrain\|>json", "commentary json"),
        (
            r"(?<=to=assistant<\|channel\|>commentary<\|message\|>)(.*?)(?=<\|end\|>)",
            lambda m: json.dumps(m[0], ensure_ascii=False),
        ),
    ],
    "bundled": [
        (r"^<\|start\|>system(?s:.*?)<\|end\|>", ""),  # of the tiny model, which is not ChatGPT
        ONE_LINE,
        NO_ARGUMENTS,
        (r"// default: C", '// default: "C"'),
        (r"\n    ", "\n"),
        (r"assistant( to=\S+)<\|channel\|>commentary", r"assistant<|channel|>commentary\1"),  # as the model answers
    ],
}
HEAD, TAIL = "<|channel|>analysis<|message|>Hm.", "<|end|><|start|>assistant"
ANSWERS = [
    "<|channel|>final<|message|>Sunny.<|return|>",
    f"{HEAD}{TAIL}<|channel|>final<|message|>18 °C “there” 😀<|return|>",
    f"{HEAD}{TAIL}<|channel|>analysis<|message|>More.{TAIL}<|channel|>final<|message|>Yes.<|return|>",
    f'{HEAD}{TAIL}<|channel|>commentary to=functions.now <|constrain|>json<|message|>{{"a": 1}}<|call|>',
    f"{HEAD}{TAIL} to=functions.now<|channel|>commentary <|constrain|>json<|message|>{{}}<|call|>",
    f"{HEAD}{TAIL} to=functions.now<|channel|>commentary json<|message|>{{}}<|call|>",
    f"{HEAD}{TAIL}<|channel|>commentary<|message|>Let me look.{TAIL}<|channel|>commentary to=functions.now"
    "<|message|>{}<|call|>",
    f"{HEAD}{TAIL}<|channel|>analysis to=functions.now<|message|>{{}}<|call|>",
    "<|channel|>final<|message|>cut in the mid",
    "<|channel|>analysis<|message|>still thinking",
]


@pytest.fixture(scope="module")
def reference():
    """What the library says of all cases."""
    command = [client_program("python", "harmony"), HERE / "harmony_reference.py"]
    asked = json.dumps({"prompts": CASES, "answers": ANSWERS})
    process = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=100, check=False)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.clients
@rows("template", *DIFFERENCES)
def test_prompts_are_the_librarys(template, reference):
    assert len(CASES) >= 30
    for case, theirs in zip(CASES, reference["prompts"], strict=True):
        assert prompt_of(template, case) == rewritten(theirs, template)


def rewritten(prompt, template):
    """The library's prompt as a template writes it."""
    for pattern, replacement in DIFFERENCES[template]:
        prompt = re.sub(pattern, replacement, prompt)
    return prompt


def prompt_of(template, case):
    """Our prompt of a case; the bundled model's without the system message, which is its own."""
    tools = [{"type": "function", "function": tool} for tool in case["tools"]]
    fields = {"messages": case["messages"], "tools": tools, "reasoning_effort": case["effort"]}
    asked = CONVERTERS[template].chat(ChatCompletionRequest.model_validate(fields), INFO, "r")
    prompt = TOKENIZER.decode(asked.requests[0].prompt_ids)
    if template == "bundled":
        return prompt.partition("<|end|>")[2]
    return re.sub(r"(?<=Current date: )\S+", DATE, prompt)


@pytest.mark.clients
def test_answers_are_read_as_the_library_reads_them(reference):
    for text, theirs in zip(ANSWERS, reference["answers"], strict=True):
        assert parts_of(text) == parts_of_messages(theirs), text


def parts_of_messages(messages):
    """The library's messages as we show them: calls, content, and reasoning in one text."""
    parts = []
    for channel, recipient, text in messages:
        if recipient is not None:
            parts.append(["call", recipient.removeprefix("functions."), text])
        elif channel == "analysis" and parts and parts[-1][0] == "reasoning":
            parts[-1][2] += f"\n{text}"
        else:
            parts.append(["reasoning" if channel == "analysis" else "content", None, text])
    return parts


def parts_of(text):
    """The same of our parser, for each part that it shows."""
    parts = []
    parser = choose_parser(TOKENIZER)([], frozenset({"now"}))
    for token_id in (*TOKENIZER.encode(text), None):
        for kind, data, _, call, name in parser.finish() if token_id is None else parser.feed(token_id):
            key = ("call" if kind is Kind.TOOL_CALL else kind.name.lower(), call)
            if not parts or parts[-1][0] != key:
                parts.append((key, name, []))
            parts[-1][2].append(data)
    return [[kind, name, b"".join(data).decode()] for (kind, _), name, data in parts]
