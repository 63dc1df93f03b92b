"""Training conversations whose answer is JSON, and those with several calls: right, and rendered as the server does."""

import json
import random
import re
from functools import cache

import jsonschema

from loaders.tokenizer import load_tokenizer
from server.prompt import ChatTemplate
from tests.tables import rows
from tools.tiny_models.data import gen_json, make_evals
from tools.tiny_models.data.example import Example, unmark
from tools.tiny_models.data.gen_agent import agent
from tools.tiny_models.data.gen_tools import domain_words, parts
from tools.tiny_models.data.holdout import is_held_out, pair_held_out
from tools.tiny_models.data.mix import GENERATORS, draw
from tools.tiny_models.families import FAMILIES, load_family

NEW = dict.fromkeys(GENERATORS, 0.0) | {"json": 1.0, "agent": 1.0}
PLAIN = ("facts", "chat")


@cache
def answers() -> list[Example]:
    rng = random.Random("json")
    return [gen_json.json_answer(rng) for _ in range(1500)]


def final(example: Example) -> str:
    return unmark(str(example.messages[-1]["content"]))


def schema_in(example: Example) -> dict | None:
    """The JSON Schema that a message holds."""
    for message in example.messages[:-1]:
        for found in re.finditer(r"\{", str(message["content"])):
            try:
                value, _ = json.JSONDecoder().raw_decode(message["content"], found.start())
            except ValueError:
                continue
            if "properties" in value:
                return value
    return None


def test_stages_name_generators_that_exist_and_the_new_ones_are_at_most_a_quarter() -> None:
    for name in FAMILIES:
        for stage in load_family(name).stages:
            assert stage.shares.keys() <= GENERATORS.keys()
            shares = {name: share for name, (_, share) in GENERATORS.items()} | dict(stage.shares)
            assert shares["json"] + shares["agent"] <= sum(shares.values()) / 4


def test_every_answer_is_one_object_and_nothing_else() -> None:
    asked = [example for example in answers() if example.category not in PLAIN]
    styles = set()
    for example in asked:
        text = final(example)
        value = json.loads(text)
        assert isinstance(value, dict)
        assert value
        assert text == text.strip()
        styles.add("indented" if "\n" in text else "compact" if re.search(r'":\S', text) else "spaced")
    assert styles == {"spaced", "compact", "indented"}
    assert len(asked) > 0.9 * len(answers())


def test_answers_fit_the_schemas_of_their_messages() -> None:
    found = [(schema, final(example)) for example in answers() if (schema := schema_in(example))]
    assert len(found) > 300
    for schema, text in found:
        jsonschema.Draft202012Validator.check_schema(schema)
        value = json.loads(text)
        jsonschema.validate(value, {**schema, "additionalProperties": False})
        assert list(value) == list(schema["properties"])  # a grammar keeps the order of the schema


@rows("name", *FAMILIES)
def test_a_forced_beginning_is_what_the_answer_begins_with_and_is_not_trained(name: str) -> None:
    dialect = load_family(name).dialect
    encoder, rng, num_forced = dialect.encoder(), random.Random(6), 0
    for drawn in answers()[:600]:
        example = dialect.adapted(rng, drawn)
        ids, given = encoder.example(example)
        prompt, target = dialect.prompt_and_target(example)
        untrained, trained = encoder.decode(ids[:given]), encoder.decode(ids[given:])
        assert untrained + trained == unmark(prompt + target)
        if example.forced:
            assert untrained.endswith(example.forced)
            assert final(example).removeprefix(example.forced) in trained
            num_forced += 1
        else:
            assert untrained == prompt
        assert trained.endswith(dialect.stop)
    assert num_forced > 60


@rows("name", *FAMILIES)
def test_the_server_renders_and_encodes_the_same(name: str) -> None:
    dialect = load_family(name).dialect
    tokenizer = load_tokenizer(dialect.folder)
    template, encoder, rng = ChatTemplate(tokenizer), dialect.encoder(), random.Random(7)
    for _ in range(80):
        example = dialect.adapted(rng, draw(rng, NEW))
        variables, ids = dialect.variables(example), encoder.text(dialect.prompt(example))
        tools = variables.pop("tools")
        assert template.render(example.messages[:-1], tools or (), variables) == ids


def test_nothing_reserved_for_the_evals_is_in_the_new_conversations() -> None:
    build = make_evals.build()
    wanted = {item["check"]["name"] for item in build["tools"]}
    lists = {item["messages"][-1]["content"] for name in ("sorting", "reversing") for item in build[name]}
    rng = random.Random(8)
    for _ in range(1500):
        example = draw(rng, NEW)
        for tool in example.tools or ():
            assert tool["function"]["name"] not in wanted
        texts = [str(m.get(key) or "") for m in example.messages for key in ("content", "reasoning")]
        assert not lists & set(texts)
        sums = [pair for text in texts for pair in re.findall(r"(?<![\d+*/.-])(\d+) ?\+ ?(\d+)(?![\d+*.])", text)]
        assert not [pair for pair in sums if pair_held_out("add", int(pair[0]), int(pair[1]))]


def test_a_fitting_function_is_called_each_time_and_otherwise_none() -> None:
    rng, endings, later = random.Random(9), [], 0
    for _ in range(600):
        example = agent(rng)
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in example.tools or ()}
        assert len(offered) == len(example.tools or ())
        called = []
        for message in example.messages:
            for call in message.get("tool_calls", ()):
                function = call["function"]
                jsonschema.validate(json.loads(function["arguments"]), offered[function["name"]])
                called.append(function["name"])
        last = example.messages[-1]
        endings.append("call" if last.get("tool_calls") else example.category)
        later += bool(last.get("tool_calls")) and called.count(called[-1]) < len(called)
        assert sum(message["role"] == "user" for message in example.messages) >= 2
    assert {"call", "chat", "results"} == set(endings)
    assert 0.5 < endings.count("call") / len(endings) < 0.9
    assert later > 100  # another function than the one before


def test_names_of_small_functions_are_not_reserved() -> None:
    rng = random.Random(10)
    for _ in range(300):
        for tool in agent(rng).tools or ():
            words = set(parts(tool["function"]["name"]))
            reserved = {word for word in words if is_held_out("identifier", word)}
            assert reserved <= domain_words()  # which the evals never use
