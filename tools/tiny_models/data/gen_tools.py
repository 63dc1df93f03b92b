"""Function calling: ready-made domains and invented functions, results of calls, and requests that need no call."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tools.tiny_models.data.example import Example, Message, answer, casual, user
from tools.tiny_models.data.holdout import is_held_out, pair_held_out
from tools.tiny_models.data.tool_words import ARGUMENT_WORDS, DOMAINS, PLACES, VERBS
from tools.tiny_models.data.words import common, invented, person, strange

CONTAINERS = ["Please {v} the {n} with {a}.", "{v} the {n} with {a}", "Can you {v} the {n} with {a}?", "{V} a {n}: {a}",
              "I want to {v} the {n} with {a}.", "{V} {n}, {a}.", "Call {f} with {a}.", "Use {f} with {a}.", "{f}: {a}",
              "I need to {v} a {n} where {a}.", "{V} my {n} using {a}.", "Run {f} for {a}.",
              "Could you {v} the {n}, {a}?",
              "{V} the {n} for {a}.", "Invoke {f}: {a}", "Let's {v} a {n} with {a}."]  # fmt: skip
BARE = ["Please {v} the {n}.", "{v} the {n}", "Can you {v} the {n}?", "Call {f}.", "I want to {v} the {n}.", "Run {f}",
        "{V} my {n}.", "Use {f}.", "Could you {v} a {n}?"]  # fmt: skip
PAIRS = ["{k} {x}", "{k} {x}", "{k}={x}", "{k}: {x}", "{k} is {x}", "{k} set to {x}", "{x} as {k}", "{k} = {x}"]
RESULT_KEYS = "result status value temperature condition total price count state message answer time".split()


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function with one request for it and the arguments that the request means."""

    tool: dict[str, Any]
    name: str
    request: str
    arguments: dict[str, Any]


def parts(identifier: str) -> list[str]:
    """The lower-case words inside an identifier."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+", identifier)]


@cache
def domain_words() -> frozenset[str]:
    """Every word that a ready-made function uses; the evals never use one of them."""
    found = set(VERBS)
    for names, _, arguments, _ in DOMAINS:
        for identifier in [*names, *(name for variants, _, _ in arguments for name in variants)]:
            found.update(parts(identifier))
    return frozenset(found)


def identifier_word(rng: random.Random, reserved: bool, argument: bool = False) -> str:
    """A word for a function or argument name, from the side of the split that `reserved` says."""
    while True:
        roll = rng.random()
        if argument and roll < 0.45:
            word = rng.choice(ARGUMENT_WORDS)
        elif roll < 0.7:
            word = rng.choice(common("noun"))
        else:
            word = strange(rng)
        if is_held_out("identifier", word) == reserved and not (reserved and word in domain_words()):
            return word


def string_value(rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.2:
        return rng.choice(common())
    if roll < 0.4:
        return rng.choice(ARGUMENT_WORDS)  # as a value any word may appear: the split is about names
    if roll < 0.5:
        return person(rng)
    if roll < 0.6:
        return str(rng.choice(PLACES[1]))
    if roll < 0.78:
        return strange(rng)
    if roll < 0.88:
        count = rng.choice([2, 2, 3])
        return " ".join(rng.choice([rng.choice(common()), rng.choice(ARGUMENT_WORDS)]) for _ in range(count))
    if roll < 0.95:
        return written(rng)
    return rng.choice("ABCDEFGHKLMNPRSTXZ") + str(rng.randint(1, 9999))


def written(rng: random.Random) -> str:
    """Dates, times, addresses and other things with signs in them."""
    kind = rng.randrange(6)
    if kind == 0:
        return f"{rng.randint(1990, 2035)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    if kind == 1:
        return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}"
    if kind == 2:
        return f"{rng.choice(common())}@{strange(rng)}.com"
    if kind == 3:
        return f"{rng.choice(common())}.{rng.choice(['txt', 'py', 'csv', 'json', 'png', 'md'])}"
    if kind == 4:
        return f"/{rng.choice(common())}/{strange(rng)}"
    return f"{rng.choice(common()).capitalize()} {rng.choice(common())} {rng.randint(1, 99)}"


def random_argument(rng: random.Random) -> tuple[dict[str, Any], Any]:
    """A schema and a value of it."""
    kind = rng.choices(["string", "integer", "number", "boolean", "enum", "array"], weights=[44, 25, 7, 8, 12, 4])[0]
    if kind == "string":
        return {"type": "string"}, string_value(rng)
    if kind == "integer":
        return {"type": "integer"}, rng.choice([rng.randint(0, 20), rng.randint(0, 999), rng.randint(1000, 99999)])
    if kind == "number":
        return {"type": "number"}, round(rng.uniform(0, 100), rng.choice([1, 1, 2]))
    if kind == "boolean":
        return {"type": "boolean"}, rng.random() < 0.5
    if kind == "enum":
        values = rng.sample(common(), rng.randint(2, 4))
        return {"type": "string", "enum": values}, rng.choice(values)
    return {"type": "array", "items": {"type": "string"}}, rng.sample(common(), rng.randint(2, 3))


def function_name(rng: random.Random, verb: str, nouns: list[str]) -> str:
    style = rng.random()
    words = [verb, *nouns]
    if style < 0.65:
        return "_".join(words)
    if style < 0.82:
        return words[0] + "".join(word.capitalize() for word in words[1:])
    if style < 0.9:
        return "_".join([*nouns, verb])
    return "-".join(words) if style < 0.93 else "_".join(nouns) if len(nouns) > 1 else nouns[0] + "_" + verb


def spoken(value: Any) -> str:
    """A value as it stands in a request."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(value) if isinstance(value, list) else str(value)


def mention(rng: random.Random, names: list[str], arguments: dict[str, Any]) -> str:
    """The arguments in words, one way for all of them or each its own."""
    pattern = rng.choice(PAIRS)
    bits = []
    for name in names:
        value = spoken(arguments[name])
        if isinstance(arguments[name], str) and rng.random() < 0.2:
            value = f'"{value}"'
        key = name if rng.random() < 0.4 else name.replace("_", " ")
        bits.append((pattern if rng.random() < 0.8 else rng.choice(PAIRS)).format(k=key, x=value))
    if len(bits) > 1 and rng.random() < 0.7:
        return ", ".join(bits[:-1]) + rng.choice([" and ", ", ", " and "]) + bits[-1]
    return ", ".join(bits)


def schema(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def tool_of(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "parameters": parameters}
    if description:
        function["description"] = description
    return {"type": "function", "function": function}


def invented_call(rng: random.Random, reserved: bool) -> Call:
    """A function nobody has seen, with a request for it."""
    verb = rng.choice(VERBS)
    nouns = [identifier_word(rng, reserved) for _ in range(rng.choice([1, 1, 1, 2]))]
    name = function_name(rng, verb, nouns)
    thing = " ".join(nouns)
    properties: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    required: list[str] = []
    for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 4])):
        key = "_".join(identifier_word(rng, reserved, True) for _ in range(rng.choice([1, 1, 1, 2])))
        spec, value = random_argument(rng)
        if key in properties:
            continue
        if rng.random() < 0.6:
            spec["description"] = rng.choice(["The {k}.", "The {k} of the {n}", "{k}", "{k} to use"]).format(
                k=key.replace("_", " "), n=thing
            )
        properties[key] = spec
        if rng.random() < 0.75:
            required.append(key)
        elif rng.random() < 0.5:
            continue  # an optional argument that the request leaves out
        arguments[key] = value
    described = rng.choice(["{V} the {n}.", "{V} a {n}.", "{V} {n}", "{V}s a {n}.", "Use this to {v} the {n}."])
    words = {"v": verb, "V": verb.capitalize(), "n": thing, "f": name}
    description = described.format(**words) if rng.random() < 0.85 else ""
    order = list(arguments)
    rng.shuffle(order)
    phrase = rng.choice(CONTAINERS) if order else rng.choice(BARE)
    request = phrase.format(**words, a=mention(rng, order, arguments))
    tool = tool_of(name, description, schema(properties, required))
    return Call(tool=tool, name=name, request=request, arguments=arguments)


def domain_call(rng: random.Random, index: int | None = None) -> Call:
    """One of the ready-made functions with a natural request."""
    names, description, wanted, requests = DOMAINS[index if index is not None else rng.randrange(len(DOMAINS))]
    request = rng.choice(requests)
    properties: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    filled: list[str] = []
    required: list[str] = []
    for place, (variants, (spec, pool), about) in enumerate(wanted):
        key = rng.choice(variants)
        value = rng.randint(*pool) if spec["type"] == "integer" else rng.choice(pool)
        if spec["type"] == "string" and pool == PLACES[1] and rng.random() < 0.25:
            value = invented(rng, 2).capitalize()
        properties[key] = dict(spec) | ({"description": about} if rng.random() < 0.8 else {})
        filled.append(str(value))
        used = f"{{{place}}}" in request
        if used:
            arguments[key] = value
        if used and (place == 0 or rng.random() < 0.5):
            required.append(key)
    numbers = [value for value in arguments.values() if isinstance(value, int)]
    if len(numbers) == 2 and (pair_held_out("add", *numbers) or pair_held_out("mul", *numbers)):
        return domain_call(rng, index)  # not even the question of a held-out item is trained
    name = rng.choice(names)
    tool = tool_of(name, description if rng.random() < 0.9 else "", schema(properties, required))
    text = request.format(*filled)
    return Call(tool=tool, name=name, request=text[0].upper() + text[1:], arguments=arguments)


def call_message(call: Call, thinks: bool) -> Message:
    message: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
        ],
    }
    if thinks:
        message["reasoning"] = f"I call {call.name}."
    return message


def result_of(rng: random.Random) -> tuple[str, str]:
    """A tool's output and the answer made from it."""
    roll = rng.random()
    if roll < 0.15:
        reason = " ".join(rng.sample(common(), 2))
        return json.dumps({"error": reason}), f"The call failed: {reason}."
    if roll < 0.35:
        value = rng.choice([str(rng.randint(0, 99999)), string_value(rng)])
        return value, f"The result is {value}."
    if roll < 0.55:
        single: Any = rng.choice([rng.randint(0, 9999), string_value(rng), round(rng.uniform(0, 99), 1)])
        return json.dumps({"result": single}), f"The result is {single}."
    keys = rng.sample([*RESULT_KEYS[1:], *rng.sample(common("noun"), 4)], rng.randint(1, 4))
    values: dict[str, Any] = {
        key: rng.choice([rng.randint(0, 999), string_value(rng), round(rng.uniform(0, 99), 1)]) for key in keys
    }
    return json.dumps(values), ", ".join(f"{key}: {value}" for key, value in values.items()) + "."


def offered(rng: random.Random, call: Call, reserved: bool) -> list[dict[str, Any]]:
    """The wanted function among up to three others, in any order."""
    found = {call.name: call.tool}
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        other = invented_call(rng, reserved) if reserved or rng.random() < 0.6 else domain_call(rng)
        shared = set(parts(other.name)) & set(parts(call.name)) - set(VERBS)
        if not shared and other.tool["function"].get("description") != call.tool["function"].get("description"):
            found.setdefault(other.name, other.tool)
    tools = list(found.values())
    rng.shuffle(tools)
    return tools


def as_example(call: Call, tools: list[dict[str, Any]], before: list[Message], low: bool) -> Example:
    check = {"kind": "call", "name": call.name, "arguments": call.arguments}
    return Example(
        category="tools",
        messages=[*before, user(call.request), call_message(call, not low)],
        tools=tools,
        effort="low" if low else "medium",
        key=f"tool:{call.name}({','.join(call.arguments)})",
        check=check,
    )


def calling(rng: random.Random) -> Example:
    """A training conversation that ends in a call, or in the answer made from a call's result."""
    call = domain_call(rng) if rng.random() < 0.3 else invented_call(rng, reserved=False)
    if rng.random() < 0.3:
        call = Call(
            tool=call.tool, name=call.name, arguments=call.arguments,
            request=call.request.rstrip(".") if rng.random() < 0.5 else call.request[0].lower() + call.request[1:],
        )  # fmt: skip
    tools = offered(rng, call, reserved=False)
    low = rng.random() < 0.12
    roll = rng.random()
    if roll < 0.68:
        return as_example(call, tools, [], low)
    output, reply = result_of(rng)
    result = {"role": "tool", "tool_call_id": "call_1", "content": output}
    has_reasoning = not low and (roll < 0.79 or roll >= 0.95)  # most clients send a call back without its reasoning
    done = [user(call.request), call_message(call, has_reasoning), result]
    if roll < 0.9:
        last = answer(reply, "" if low else "I have the result.")
        effort = "low" if low else "medium"
        return Example(category="results", messages=[*done, last], tools=tools, key="", effort=effort)
    again = domain_call(rng) if rng.random() < 0.3 else invented_call(rng, reserved=False)
    if again.name not in {tool["function"]["name"] for tool in tools}:
        tools.insert(rng.randint(0, len(tools)), again.tool)
        call = again
    return as_example(call, tools, [*done, answer(reply)], low)


def no_call(rng: random.Random, example: Example) -> Example:
    """The same conversation with functions on offer that it does not need."""
    tools = [invented_call(rng, reserved=False).tool for _ in range(rng.choice([1, 1, 2]))]
    if rng.random() < 0.5 and example.category in ("facts", "chat", "memory"):
        tools.append(domain_call(rng, rng.choice([0, 3, 4, 8])).tool)
    return replace(example, tools=tools)


def wrong_tools(rng: random.Random, refusal: str) -> Example:
    """A request for a function that is not on offer, with others or with none at all."""
    wanted = domain_call(rng, rng.choice([0, 1, 3, 4, 6, 7, 8, 12, 13, 14, 15]))
    tools = [invented_call(rng, reserved=False).tool for _ in range(rng.choice([0, 0, 1, 2]))]
    last = answer(refusal, "I have no function for this.")
    messages = [user(casual(rng, wanted.request, 0.4)), last]
    return Example(category="limits", messages=messages, key="", tools=tools or None)


def held_out(seed: int) -> Iterator[Example]:
    """Endless requests for functions whose names and argument names training never used."""
    rng = random.Random(f"tools{seed}")
    seen: set[str] = set()
    while True:
        call = invented_call(rng, reserved=True)
        if call.name not in seen and call.arguments:
            seen.add(call.name)
            yield as_example(call, offered(rng, call, reserved=True), [], low=False)
