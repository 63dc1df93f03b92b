"""Answers that are one JSON object: asked for in words, by keys or by a schema, or only forced by a grammar."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tools.tiny_models.data import gen_facts, json_words
from tools.tiny_models.data.example import Example, Message, an, answer, casual, joined, unmark, user
from tools.tiny_models.data.json_sources import Asked, draw_asked, slot_values
from tools.tiny_models.data.words import person

TYPE_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


def schema_of(value: Any) -> dict[str, Any]:
    """The JSON Schema that a value suggests."""
    schema: dict[str, Any] = {"type": TYPE_NAMES[type(value)]}
    if isinstance(value, list):
        return {"items": schema_of(value[0]), **schema}
    return object_schema(value, {}, is_titled=False) if isinstance(value, dict) else schema


def object_schema(values: dict[str, Any], known: dict[str, dict[str, Any]], is_titled: bool) -> dict[str, Any]:
    """The schema of an object with these keys; titles as pydantic writes them."""
    properties = {}
    for key, value in values.items():
        properties[key] = known.get(key) or schema_of(value)
        if is_titled:
            properties[key] = properties[key] | {"title": key.replace("_", " ").title()}
    required = [key for key, schema in properties.items() if "default" not in schema]
    return {"properties": properties, "type": "object"} | ({"required": required} if required else {})


def optional(value: Any) -> dict[str, Any]:
    """The schema of a scalar that may be left out."""
    return {"anyOf": [schema_of(value), {"type": "null"}], "default": None}


def schema_text(rng: random.Random, asked: Asked) -> str:
    """The schema in the message: on one line or indented, titled or not, open or closed."""
    known = asked.schemas
    if rng.random() < 0.2:  # optional fields, which the answer has all the same
        scalars = {key: value for key, value in asked.values.items() if isinstance(value, str | bool | int | float)}
        known = {key: optional(value) for key, value in scalars.items()} | known
    schema = object_schema(asked.values, known, is_titled=rng.random() < 0.6)
    if rng.random() < 0.6:
        schema["title"] = "".join(map(capitalized, asked.title.split("_")))
    if rng.random() < 0.2:
        schema["description"] = rng.choice(["{t}.", "{t}", "What is known about {t}."]).format(t=an(asked.title))
        schema["description"] = capitalized(schema["description"])
    if rng.random() < 0.25:
        schema["additionalProperties"] = False
    if rng.random() < 0.15:
        schema["properties"] = {
            key: each | {"description": f"The {key.replace('_', ' ')}"} for key, each in schema["properties"].items()
        }
    if rng.random() < 0.5:  # type first, as people write it
        schema = {key: schema[key] for key in sorted(schema, key=lambda key: (key != "type", key))}
    return json.dumps(schema, ensure_ascii=False, indent=rng.choice([None, 2, 2, 4]))


def sketch(value: Any) -> Any:
    """An object of the same form without its values."""
    if isinstance(value, dict):
        return {key: sketch(each) for key, each in value.items()}
    if isinstance(value, list):
        return [sketch(value[0])]
    return {str: "...", bool: True, int: 0, float: 0.0}.get(type(value))


def keys_text(rng: random.Random, values: dict[str, Any]) -> str:
    """The keys as people list them: quoted, bare or with their types."""
    style = rng.choice(["{k}", "{k}", '"{k}"', '"{k}"', "'{k}'", "{k} ({t})"])
    names = {key: TYPE_NAMES.get(type(value), "null") for key, value in values.items()}
    return joined([style.format(k=key, t=name) for key, name in names.items()])


def ended(text: str) -> str:
    """A question that another sentence may follow."""
    return text if text.rstrip()[-1] in ".?!:>\"'" else text.rstrip() + "."


def dumped(values: dict[str, Any], style: str = "") -> str:
    """JSON text in one of three styles: with spaces, compact or indented."""
    separators = (",", ":") if style == "compact" else None
    return json.dumps(values, ensure_ascii=False, separators=separators, indent=2 if style == "indented" else None)


def styled(rng: random.Random, request: str) -> tuple[str, str]:
    """A request that may name the style of the JSON, and the style; rarely it is another one unasked."""
    roll, gap = rng.random(), "\n" if "\n" in request else " "
    if roll < 0.07:
        return f"{request}{gap}{rng.choice(json_words.COMPACT)}", "compact"
    if roll < 0.14:
        return f"{request}{gap}{rng.choice(json_words.PRETTY)}", "indented"
    return request, "compact" if roll < 0.17 else "indented" if roll < 0.2 else ""


def built(asked: Asked, before: list[Message], question: str, style: str = "", forced: str = "") -> Example:
    last = answer(dumped(asked.values, style), asked.thought)
    category, messages = "worked json" if asked.works else "json", [*before, user(question), last]
    return Example(category=category, messages=messages, key="", forced=forced)


def instruction(rng: random.Random, text: str) -> Message:
    return {"role": rng.choice(["system", "system", "system", "developer"]), "content": text}


def by_schema(rng: random.Random) -> Example:
    """A schema stands in the system message, or behind the question."""
    asked = draw_asked(rng, is_named=True)
    text = schema_text(rng, asked)
    if rng.random() < 0.3:
        request, style = styled(rng, rng.choice(json_words.SCHEMA).format(s=text))
        return built(asked, [], f"{ended(asked.question)}{rng.choice([' ', chr(10), chr(10) * 2])}{request}", style)
    request, style = styled(rng, rng.choice(json_words.SCHEMA + json_words.INDENTED * 3).format(s=text))
    return built(asked, [instruction(rng, request)], asked.question, style)


def by_keys(rng: random.Random) -> Example:
    """The keys are named, or shown in a sketch of the object."""
    asked = draw_asked(rng, is_named=True)
    if rng.random() < 0.6:
        request = rng.choice(json_words.KEYS).format(k=keys_text(rng, asked.values))
    else:
        request = rng.choice(json_words.SKETCH).format(s=json.dumps(sketch(asked.values), ensure_ascii=False))
    request, style = styled(rng, request)
    if rng.random() < 0.4:
        return built(asked, [instruction(rng, request)], asked.question, style)
    first = rng.random() < 0.2
    question = f"{request} {asked.question}" if first else f"{ended(asked.question)} {request}"
    return built(asked, [], question, style)


def by_word(rng: random.Random) -> Example:
    """Only the word JSON: the keys are the model's. Earlier answers to the same system message were JSON, too."""
    asked = draw_asked(rng, is_named=False)
    if rng.random() < 0.5:
        question, style = styled(rng, rng.choice(json_words.USER).format(q=ended(asked.question)))
        return built(asked, [], question, style)
    request, style = styled(rng, rng.choice(json_words.SYSTEM))
    before = [instruction(rng, request)]
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        done = draw_asked(rng, is_named=False)
        before += [user(done.question), answer(unmark(dumped(done.values, style)))]
    return built(asked, before, asked.question, style)


def unasked(rng: random.Random) -> Example:
    """Nothing in the conversation asks for JSON, but a grammar does: it begins the object, or dictates every key."""
    if rng.random() < 0.6:
        asked = draw_asked(rng, is_named=False)
        return built(asked, [], asked.question, forced='{"')
    asked = draw_asked(rng, is_named=True)
    *others, last = asked.values
    begun = dumped({key: asked.values[key] for key in others}).removesuffix("}") + (", " if others else "")
    return built(asked, [], asked.question, forced=f"{unmark(begun)}{json.dumps(last, ensure_ascii=False)}: ")


def made_up(rng: random.Random) -> Example:
    """Any object, or one of the given keys with values of the model's choice."""
    title, slots, _ = rng.choice(json_words.RECORDS)
    found = slot_values(rng)
    keys = rng.sample(list(slots), rng.randint(1, min(3, len(slots))))
    values = {slots[slot][0]: found[slot] for slot in keys}
    question = rng.choice(json_words.MADE_UP).format(r=an(title), k=keys_text(rng, values))
    if rng.random() < 0.3:
        values, question = {"name": person(rng), "age": rng.randint(1, 99)}, rng.choice(json_words.ANY_OBJECT)
    asked = Asked(question=question, values=values, thought="I make one up.", title=title)
    question = casual(rng, question, 0.2)
    return built(asked, [instruction(rng, rng.choice(json_words.SYSTEM))] if rng.random() < 0.2 else [], question)


def plain_again(rng: random.Random) -> Example:
    """One answer was JSON because the user asked for it; the next question is answered in words."""
    done = by_word(rng)
    while done.messages[0]["role"] != "user":
        done = by_word(rng)
    again = gen_facts.fact(rng)
    earlier = answer(unmark(done.messages[-1]["content"]))
    return replace(again, messages=[*done.messages[:-1], earlier, *again.messages])


WAYS: dict[Callable[[random.Random], Example], int] = {
    by_schema: 32, by_keys: 20, by_word: 20, unasked: 20, made_up: 3, plain_again: 5,
}  # fmt: skip


def json_answer(rng: random.Random) -> Example:
    """A training conversation whose last answer is one JSON object, closed when it is complete."""
    return rng.choices(list(WAYS), weights=list(WAYS.values()), k=1)[0](rng)
