"""The evals' items are disjoint from the training stream: by the rule, and in a sample of generated documents."""

import json
import random
import re
from functools import cache
from pathlib import Path

import pytest

from tests import tables
from tools.tiny_models.data import gen_facts, gen_tools, make_evals, phrasings
from tools.tiny_models.data.example import Example
from tools.tiny_models.data.holdout import is_held_out, list_key, pair_held_out
from tools.tiny_models.data.mix import draw
from tools.tiny_models.data.words import rows

DATA = Path(make_evals.DATA)
SAMPLE = 12500


@cache
def training_sample() -> list[Example]:
    rng = random.Random("a seed that no training run used")
    return [draw(rng) for _ in range(SAMPLE)]


@cache
def items(category: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / f"{category}.jsonl").read_text().splitlines()]


def spoken(example: Example) -> list[str]:
    """Every text of a conversation, thoughts included."""
    return [str(message.get(key) or "") for message in example.messages for key in ("content", "reasoning")]


def test_shipped_items_are_what_the_generator_makes() -> None:
    for name, built in make_evals.build().items():
        assert json.loads(json.dumps(built)) == items(name), name


def test_at_least_a_thousand_different_items(subtests: pytest.Subtests) -> None:
    for category in ["addition", "subtraction", "multiplication", "sorting", "reversing", "memory", "tools", "facts"]:
        with subtests.test(category=category):
            keys = {item["key"] for item in items(category)}
            assert len(keys) >= 1000
            assert len(keys) == len(items(category))


@tables.rows("category, kind", ("addition", "add"), ("subtraction", "sub"), ("multiplication", "mul"))
def test_arithmetic_items_are_reserved_by_their_unordered_pair(category: str, kind: str) -> None:
    for item in items(category):
        a, b = map(int, item["key"].split(":")[1].split(","))
        assert pair_held_out(kind, a, b)
        assert pair_held_out(kind, b, a)


def test_training_never_shows_a_reserved_sum() -> None:
    pattern = re.compile(r"(?<![\d+*/.-])(\d+) ?\+ ?(\d+)(?![\d+*.])")
    found = [pair for example in training_sample() for text in spoken(example) for pair in pattern.findall(text)]
    assert len(found) > 5000
    assert not [pair for pair in found if pair_held_out("add", int(pair[0]), int(pair[1]))]


@tables.rows("category, kind", ("subtraction", "sub"), ("multiplication", "mul"))
def test_training_keys_of_other_operations_are_not_reserved(category: str, kind: str) -> None:
    keys = [example.key for example in training_sample() if example.category == category]
    assert len(keys) > 100
    assert not [key for key in keys if pair_held_out(kind, *map(int, key.split(":")[1].split(",")))]


def test_lists_and_words_are_reserved_by_their_contents() -> None:
    for category, kind in (("sorting", "sort"), ("reversing", "reverse")):
        reserved = {item["key"] for item in items(category)}
        assert all(is_held_out(kind, key.split(":", 1)[1]) for key in reserved)
        trained = {example.key for example in training_sample() if example.category == category}
        assert len(trained) > 500
        assert not trained & reserved
        assert not [key for key in trained if is_held_out(kind, key.split(":", 1)[1])]


def test_order_does_not_make_a_list_another_item() -> None:
    assert list_key([3, 1, 2]) == list_key([2, 3, 1])


def test_every_entity_has_three_unseen_phrasings() -> None:
    asked: dict[str, set[str]] = {}
    for item in items("facts"):
        relation, entity, phrase = item["key"].split(":", 2)
        assert phrase in phrasings.HELD_OUT[relation]
        asked.setdefault(entity, set()).add(phrase)
    assert len(asked) == len(rows("countries")) + len(rows("elements"))
    assert min(map(len, asked.values())) >= 3


def test_held_out_phrasings_are_never_composed() -> None:
    rng = random.Random(0)
    for relation, reserved in phrasings.RESERVED.items():
        composed = {phrasings.core(phrasings.trained(relation, rng)) for _ in range(4000)}
        assert len(composed) > 50
        assert not composed & reserved, relation


def test_training_questions_about_facts_hold_no_reserved_wording() -> None:
    fixed = {
        piece
        for phrases in phrasings.HELD_OUT.values()
        for phrase in phrases
        for piece in phrasings.core(phrase).split("{x}")
        if len(piece.split()) >= 5
    }
    assert len(fixed) >= 10
    texts = [phrasings.core(str(e.messages[-2]["content"])) for e in training_sample() if e.category == "facts"]
    assert not [text for text in texts for piece in fixed if piece in text]


def function_names(tools: list[dict]) -> tuple[set[str], set[str]]:
    names = {tool["function"]["name"] for tool in tools}
    arguments = {key for tool in tools for key in tool["function"]["parameters"]["properties"]}
    return names, arguments


def test_functions_and_arguments_of_the_evals_are_unseen() -> None:
    wanted = {item["check"]["name"] for item in items("tools")}
    arguments = {key for item in items("tools") for key in item["check"]["arguments"]}
    assert len(wanted) >= 300
    seen_names: set[str] = set()
    seen_arguments: set[str] = set()
    for example in training_sample():
        if example.tools:
            names, keys = function_names(example.tools)
            seen_names |= names
            seen_arguments |= keys
    assert len(seen_names) > 2000
    assert not wanted & seen_names
    assert not arguments & seen_arguments


def test_reserved_identifiers_are_made_of_reserved_words() -> None:
    for item in items("tools"):
        words = [w for w in gen_tools.parts(item["check"]["name"]) if w not in gen_tools.VERBS]
        assert words
        assert all(is_held_out("identifier", word) for word in words)
        for key in item["check"]["arguments"]:
            assert all(is_held_out("identifier", word) for word in key.split("_"))


def test_names_to_remember_are_reserved() -> None:
    told = {item["key"].split(":", 1)[1] for item in items("memory")}
    assert all(is_held_out("memory", value) for value in told)
    trained = {e.key.split(":", 1)[1] for e in training_sample() if e.category == "memory" and e.key}
    assert len(trained) > 100
    assert not trained & told


def test_facts_questions_name_their_entity() -> None:
    for item in items("facts"):
        relation = item["key"].split(":")[0]
        assert relation in (*gen_facts.COUNTRY_RELATIONS, *gen_facts.ELEMENT_RELATIONS)
        assert "{x}" not in item["messages"][0]["content"]
