"""Questions with the values that answer them: what an answer in JSON is about, apart from how it is asked for."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tools.tiny_models.data import gen_arithmetic, gen_chat, gen_facts, gen_lists, json_words, phrasings
from tools.tiny_models.data.example import an
from tools.tiny_models.data.gen_tools import identifier_word, mention, random_argument
from tools.tiny_models.data.gen_units import units
from tools.tiny_models.data.tool_words import CLOCK, DAYS, PLACES
from tools.tiny_models.data.words import common, invented, person, rows

FACT_KEYS = {
    "capital": ["capital", "city", "capital_city", "answer", "name"],
    "currency": ["currency", "money", "currency_name", "answer"],
    "languages": ["languages", "official_languages", "spoken", "answers"],
    "continent": ["continent", "region", "location", "answer"],
    "capital_of": ["country", "country_name", "answer", "name"],
    "symbol": ["symbol", "chemical_symbol", "answer"],
    "number": ["atomic_number", "number", "protons", "answer"],
    "by_symbol": ["element", "name", "answer", "element_name"],
    "by_number": ["element", "name", "answer", "element_name"],
}
ANSWER_KEYS = ["answer", "answer", "response", "text", "reply", "message", "content"]
RESULT_KEYS = ["result", "result", "answer", "value", "total", "number"]
SORTED_KEYS = ["sorted", "result", "items", "list", "answer", "values"]
REVERSED_KEYS = ["reversed", "result", "answer", "text", "value"]
KINDS = {"animal": gen_chat.ANIMALS, "food": gen_chat.FOODS, "color": gen_chat.COLOURS, "job": gen_chat.JOBS}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question and the object that answers it.

    schemas: of those keys whose values do not tell it. works: the thought carries the work, so low effort keeps it.
    """

    question: str
    values: dict[str, Any]
    thought: str
    title: str = "answer"
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)
    works: bool = False


def key_of(rng: random.Random, keys: list[str], is_named: bool) -> str:
    """The usual key, or any where the request names it."""
    return rng.choice(keys) if is_named else keys[0]


def fact(rng: random.Random, is_named: bool) -> Asked:
    """A country or an element, one relation; what it is about stands in the object now and then."""
    relation = rng.choice(["capital", "capital", *FACT_KEYS])
    row = rng.choice(gen_facts.pool(relation))
    example = gen_facts.ask(relation, row, phrasings.trained(relation, rng), rng)
    column = {"capital_of": "name", "by_symbol": "name", "by_number": "name"}.get(relation, relation)
    key, value = key_of(rng, FACT_KEYS[relation], is_named), row[column]
    values, schemas = {key: value}, {}
    if is_named and isinstance(value, str) and rng.random() < 0.25:
        others = {str(rng.choice(gen_facts.pool(relation))[column]) for _ in range(rng.choice([1, 2]))}
        schemas[key] = {"enum": rng.sample(sorted(others | {value}), len(others | {value})), "type": "string"}
    if is_named and column != "name" and rng.random() < 0.3:
        about = {"country" if relation in gen_facts.COUNTRY_RELATIONS else "element": row["name"]}
        values = about | values if rng.random() < 0.7 else values | about
    if is_named and relation == "capital" and rng.random() < 0.25:
        values["is_capital"] = True
    return Asked(
        question=example.messages[-2]["content"], values=values, schemas=schemas,
        thought=example.messages[-1].get("reasoning", ""), title=rng.choice(["answer", "fact"]),
    )  # fmt: skip


def overview(rng: random.Random, is_named: bool) -> Asked:
    """Several things about a country or an element."""
    if rng.random() < 0.6:
        row = rng.choice(rows("countries"))
        pool, kind, name = ["capital", "currency", "languages", "continent"], "country", gen_facts.country_name(row)
    else:
        row = rng.choice(rows("elements"))
        pool, kind, name = ["symbol", "number"], "element", row["name"]
    wanted = rng.sample(pool, rng.randint(2, min(3, len(pool)))) if is_named else pool
    values = {key_of(rng, [FACT_KEYS[each][0]], is_named): row[each] for each in wanted}
    if not is_named or rng.random() < 0.5:
        values = {rng.choice(["name", kind]) if is_named else "name": row["name"]} | values
    question = rng.choice(["Tell me about {x}.", "Facts about {x}?", "What do you know about {x}?", "Describe {x}."])
    return Asked(question=question.format(x=name), values=values, thought=f"What I know about {name}.", title=kind)


def capital_check(rng: random.Random, is_named: bool) -> Asked:
    """Yes or no as a boolean."""
    row = rng.choice(rows("countries"))
    city = row["capital"] if rng.random() < 0.5 else rng.choice(rows("countries"))["capital"]
    key = key_of(rng, ["is_capital", "answer", "is_true", "correct", "result"], is_named)
    text = rng.choice(["Is {c} the capital of {x}?", "Is it true that {c} is the capital of {x}?"])
    return Asked(
        question=text.format(c=city, x=gen_facts.country_name(row)), values={key: city == row["capital"]},
        thought=f"capital of {gen_facts.country_name(row)}: {row['capital']}", title="check",
    )  # fmt: skip


def worked(rng: random.Random, is_named: bool) -> Asked:
    """Arithmetic, sorted and reversed lists, reversed words."""
    roll = rng.random()
    if roll < 0.5:
        example = gen_arithmetic.train(rng.choice("++--*/"), rng)
        keys, value = RESULT_KEYS, example.check["value"]
    else:
        example = (gen_lists.sorting if roll < 0.8 else gen_lists.reversing)(rng)
        keys = SORTED_KEYS if roll < 0.8 else REVERSED_KEYS
        items = example.check.get("items")
        value = example.messages[-1]["content"] if items is None else items
        if items and all(item.isdigit() for item in items):
            value = [int(item) for item in items]
    return Asked(
        question=example.messages[-2]["content"], values={key_of(rng, keys, is_named): value},
        thought=example.messages[-1]["reasoning"], title="result", works=True,
    )  # fmt: skip


def said(rng: random.Random, is_named: bool) -> Asked:
    """What the model would say without JSON, as the only string."""
    source = rng.choice([gen_chat.small_talk, gen_chat.small_talk, gen_lists.counting, gen_facts.definition, units])
    example = source(rng) if rng.random() < 0.9 else gen_chat.out_of_scope(rng)
    return Asked(
        question=example.messages[-2]["content"],
        values={key_of(rng, ANSWER_KEYS, is_named): example.messages[-1]["content"]},
        thought=example.messages[-1].get("reasoning", ""), works=example.category in ("counting", "units"),
    )  # fmt: skip


def slot_values(rng: random.Random) -> dict[str, Any]:
    """A value for every slot of the records."""
    city, goal = rng.sample([place for place in PLACES[1] if "," not in place], 2)
    return {
        "name": person(rng) + (f" {invented(rng).capitalize()}" if rng.random() < 0.2 else ""),
        "age": rng.randint(1, 99),
        "city": invented(rng).capitalize() if rng.random() < 0.2 else city,
        "goal": goal,
        "job": rng.choice(gen_chat.JOBS),
        "item": rng.choice(common("noun")),
        "price": round(rng.uniform(1, 100), 2) if rng.random() < 0.5 else rng.randint(1, 500),
        "count": rng.randint(2, 60),
        "colour": rng.choice(gen_chat.COLOURS),
        "title": rng.choice(
            ["meeting", "concert", "party", "dinner", "lecture", "workshop", "game", "wedding", "exam"]
        ),
        "date": rng.choice([day for day in DAYS[1] if day[0].isupper() or day[0].isdigit()]),
        "time": rng.choice(CLOCK[1]),
        "mail": f"{rng.choice(common())}@{rng.choice(['example.com', 'example.org', 'mail.net'])}",
    }


def one_record(rng: random.Random, number: int, keys: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """A sentence of one kind of record and what it says, in the order of the sentence."""
    _, slots, sentences = json_words.RECORDS[number]
    sentence, found = rng.choice(sentences), slot_values(rng)
    mentioned = sorted((slot for slot in slots if f"{{{slot}}}" in sentence), key=lambda s: sentence.index(f"{{{s}}}"))
    spoken = {slot: an(value) if slot == "job" else value for slot, value in found.items()}
    return sentence.format(**spoken), {keys[slot]: found[slot] for slot in mentioned}


def reading(rng: random.Random, is_named: bool) -> Asked:
    """Reads a record, or two alike, from sentences. Named keys may be fewer, or one more that is null."""
    number = rng.choice([0, 0, *range(len(json_words.RECORDS))])
    title, slots, _ = json_words.RECORDS[number]
    keys: dict[str, str] = {}
    while len(set(keys.values())) < len(slots):
        keys = {slot: key_of(rng, variants, is_named) for slot, variants in slots.items()}
    sentence, values = one_record(rng, number, keys)
    missing = [slot for slot, key in keys.items() if key not in values]
    schemas: dict[str, dict[str, Any]] = {}
    roll = rng.random() if is_named else 1.0
    if roll < 0.12 and missing:
        slot = rng.choice(missing)
        kind = "integer" if slot in ("age", "count") else "number" if slot == "price" else "string"
        values[keys[slot]] = None
        schemas[keys[slot]] = {"anyOf": [{"type": kind}, {"type": "null"}], "default": None}
    elif roll < 0.24:
        values = {rng.choice([title, "data"]): values}
    elif roll < 0.34 and title in ("person", "product"):
        again, more = one_record(rng, number, keys)
        while more.keys() != values.keys():
            again, more = one_record(rng, number, keys)
        sentence, values = f"{sentence} {again}", {"people" if title == "person" else "products": [values, more]}
    elif roll < 0.5:
        values = dict(rng.sample(list(values.items()), rng.randint(1, len(values))))
    text = rng.choice(json_words.READ).format(t=sentence, r=title)
    return Asked(question=text, values=values, schemas=schemas, thought="I read it in the text.", title=title)


def stated(rng: random.Random, is_named: bool) -> Asked:
    """Keys that nobody has seen, with their values in the text."""
    del is_named  # the text has the keys
    values: dict[str, Any] = {}
    schemas: dict[str, dict[str, Any]] = {}
    for _ in range(rng.choice([1, 2, 2, 3, 4])):
        key = "_".join(identifier_word(rng, False, True) for _ in range(rng.choice([1, 1, 2])))
        schema, value = random_argument(rng)
        values[key] = value
        schemas[key] = schema
    text = rng.choice(json_words.READ).format(t=mention(rng, list(values), values), r="data")
    return Asked(question=text, values=values, schemas=schemas, thought="I read it in the text.", title="data")


def classified(rng: random.Random, is_named: bool) -> Asked:
    """The sentiment of a review, or the kind of a thing."""
    if rng.random() < 0.6:
        is_good = rng.random() < 0.5
        review = rng.choice(json_words.GOOD if is_good else json_words.BAD).format(n=rng.choice(common("noun")))
        question, value = rng.choice(json_words.FEELING).format(t=review), "positive" if is_good else "negative"
        key, names = key_of(rng, ["sentiment", "label", "class", "feeling"], is_named), ["positive", "negative"]
        if is_named and rng.random() < 0.3:
            return Asked(question=question, values={"is_positive": is_good}, thought=f"It is {value}.", title="review")
    else:
        value = rng.choice(list(KINDS))
        names = [value, *rng.sample([kind for kind in KINDS if kind != value], rng.choice([1, 2, 3]))]
        rng.shuffle(names)
        thing, choices = rng.choice(KINDS[value]), " or ".join(map(an, names))
        question = rng.choice(["Is {t} {c}?", "Classify {t}: {c}?", "What is {t}, {c}?"]).format(t=thing, c=choices)
        key = key_of(rng, ["category", "kind", "label", "type"], is_named)
    schemas = {key: {"enum": names, "type": "string"}} if rng.random() < 0.7 else {}
    return Asked(
        question=question, values={key: value}, schemas=schemas, thought=f"It is {value}.", title="classification"
    )


SOURCES: dict[Callable[[random.Random, bool], Asked], int] = {
    fact: 26, overview: 6, capital_check: 4, worked: 16, said: 12, reading: 22, stated: 8, classified: 6,
}  # fmt: skip


def draw_asked(rng: random.Random, is_named: bool) -> Asked:
    """One question; is_named: the request names the keys, so they need not be the usual ones."""
    return rng.choices(list(SOURCES), weights=list(SOURCES.values()), k=1)[0](rng, is_named)
