"""Conversations of several questions, each answered by a call of a small function, or directly where none fits."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

from tools.tiny_models.data import gen_facts
from tools.tiny_models.data.example import Example, Message, an, answer, finished, user
from tools.tiny_models.data.gen_chat import ANIMALS, CITIES, FOODS, small_talk
from tools.tiny_models.data.gen_tools import (
    Call,
    as_example,
    call_message,
    domain_words,
    function_name,
    identifier_word,
    invented_call,
    parts,
    result_of,
    schema,
    tool_of,
)
from tools.tiny_models.data.holdout import is_held_out
from tools.tiny_models.data.tool_words import PLACES, TICKERS, VERBS
from tools.tiny_models.data.words import common, invented, person, rows, strange


@dataclass(frozen=True, kw_only=True)
class Topic:
    """What a family of small functions does: words of their names, their parameter, ways to ask for them."""

    verbs: tuple[str, ...]
    noun: str  # with _ between its words; "" where the noun is drawn
    argument: str  # a kind of value, see `values_of`
    questions: tuple[str, ...]  # {x} is the value, {n} the noun


ASK_OF = ("What is the {n} of {x}?", "What is the {n} of {x}?", "Get the {n} of {x}", "{n} of {x}", "{x} {n}?",
          "What's the {n} of {x}?", "Tell me the {n} of {x}.", "I need the {n} of {x}.", "Which {n} does {x} have?",
          "And the {n} of {x}?", "Do you know the {n} of {x}?")  # fmt: skip
ASK_FIND = ("Find {an} in {x}", "Find me {an} in {x}.", "Is there {an} in {x}?", "I need {an} in {x}.",
            "{n} in {x}?", "Search for {an} in {x}.", "Which {n} in {x} is good?")  # fmt: skip
ASK_SEND = ("Send {an} to {x}", "Send {x} {an}.", "Write {an} to {x}.", "Please send {an} to {x}.",
            "Can you send {an} to {x}?", "{x} needs {an} from me.")  # fmt: skip
GET = ("get", "get", "get", "get", "fetch", "find", "read", "")
TOPICS = [
    Topic(verbs=GET, noun=noun, argument=argument, questions=ASK_OF + more)
    for noun, argument, more in (
        ("population", "country", ("How many people live in {x}?", "How big is the population of {x}?")),
        ("population", "city", ("How many people live in {x}?",)),
        ("area", "country", ("How big is {x}?", "How large is {x}?")),
        ("capital", "country", ("Which city is the capital of {x}?",)),
        ("currency", "country", ("Which currency does {x} use?", "What money is used in {x}?")),
        ("language", "country", ("Which language is spoken in {x}?",)),
        ("president", "country", ("Who is the president of {x}?", "Who rules {x}?")),
        ("flag", "country", ("What does the flag of {x} look like?",)),
        ("symbol", "element", ("What is the symbol of {x}?",)),
        ("price", "product", ("How much is {x}?", "What does {x} cost?", "How much does {x} cost?")),
        ("stock", "product", ("Do we have {x}?", "How much {x} is left?")),
        ("calories", "food", ("How many calories does {x} have?",)),
        ("recipe", "food", ("How do I cook {x}?", "How do you make {x}?")),
        ("weight", "animal", ("How heavy is the {x}?",)),
        ("age", "person", ("How old is {x}?",)),
        ("birthday", "person", ("When is the birthday of {x}?", "When was {x} born?")),
        ("phone_number", "person", ("What is {x}'s phone number?",)),
        ("address", "person", ("Where does {x} live?",)),
        ("salary", "person", ("How much does {x} earn?",)),
        ("definition", "word", ("What does {x} mean?", "Define {x}.")),
        ("length", "word", ("How long is the word {x}?",)),
        ("share_price", "ticker", ("How much is {x} worth?",)),
    )
] + [
    Topic(verbs=GET, noun="weather", argument="city", questions=(
        "What is the weather in {x}?", "What's the weather in {x}?", "weather in {x}", "How is the weather in {x}?",
        "Is it cold in {x}?", "What is the weather like in {x}?")),
    Topic(verbs=GET, noun="time", argument="city", questions=(
        "What time is it in {x}?", "What is the time in {x}?", "time in {x}", "How late is it in {x}?",
        "Tell me the time in {x}.")),
    Topic(verbs=GET, noun="temperature", argument="city", questions=(
        "What is the temperature in {x}?", "temperature in {x}", "How warm is it in {x}?", "How hot is {x} today?")),
    Topic(verbs=GET, noun="news", argument="city", questions=(
        "What is new in {x}?", "news from {x}", "What happened in {x}?")),
    *(Topic(verbs=("find", "find", "search", "book"), noun=noun, argument="city", questions=ASK_FIND)
      for noun in ("hotel", "restaurant", "doctor", "museum", "flight", "park", "shop", "cinema")),
    *(Topic(verbs=("send", "send", "write"), noun=noun, argument="person", questions=ASK_SEND)
      for noun in ("mail", "message", "letter", "invoice", "gift", "note", "reminder")),
    # Drawn nouns: any function that gets one thing of another.
    *(Topic(verbs=GET, noun="", argument=argument, questions=ASK_OF)
      for argument in ("country", "city", "product", "person", "word", "animal", "thing", "thing")),
]  # fmt: skip
PARAMETERS = {
    "country": ("country", "country", "name"), "city": ("city", "city", "location", "place"),
    "product": ("product", "item", "name"), "person": ("name", "person", "to", "recipient"), "word": ("word", "text"),
    "animal": ("animal", "name"), "food": ("food", "dish", "name"), "element": ("element", "name"),
    "ticker": ("symbol", "ticker"), "thing": ("name", "id", "key", "query"),
}  # fmt: skip
DESCRIBED = ("{N} of {a}", "Get the {n} of {a}.", "Get the {n}.", "The {n} of {a}.", "{N}", "Returns the {n}.",
             "Look up the {n} of {a}", "{N} of {a}")  # fmt: skip
DONE = {"find": ("Find {an}", "Find {an} in a city."), "search": ("Search for {an}.",), "book": ("Book {an}.",),
        "send": ("Send {an}", "Send {an} to a person."), "write": ("Write {an}.",)}  # fmt: skip

FACT_NOUNS = {"capital", "currency", "language", "symbol"}  # what functions get although the model knows it


@cache
def topics() -> tuple[Topic, ...]:
    """Those whose nouns are not reserved for the functions of the evals."""
    return tuple(topic for topic in TOPICS if all(map(is_free, parts(topic.noun))))


@cache
def is_free(word: str) -> bool:
    return word in domain_words() or not is_held_out("identifier", word)


def value_of(rng: random.Random, kind: str) -> str:
    if kind == "country":
        return str(rng.choice(rows("countries"))["name"])
    if kind == "city":
        return invented(rng, 2).capitalize() if rng.random() < 0.15 else str(rng.choice(CITIES + PLACES[1]))
    if kind == "product":
        return str(rng.choice(FOODS + list(common("noun"))))
    if kind == "element":
        return str(rng.choice(rows("elements"))["name"])
    if kind == "thing":
        return strange(rng) if rng.random() < 0.5 else str(rng.randint(1, 9999))
    pools = {"food": FOODS, "animal": ANIMALS, "ticker": TICKERS[1], "word": common()}
    return rng.choice(pools[kind]) if kind in pools else person(rng)


@dataclass(frozen=True, kw_only=True)
class Function:
    """A small function that stays on offer for the whole conversation."""

    topic: Topic
    noun: str
    parameter: str
    tool: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.tool["function"]["name"])


def small_function(rng: random.Random) -> Function:
    """One string parameter, described briefly or not at all."""
    topic = rng.choice(topics())
    noun = topic.noun or identifier_word(rng, reserved=False)
    verb, words = rng.choice(topic.verbs), noun.split("_")
    name = function_name(rng, verb, words) if verb else noun
    parameter = rng.choice([each for each in PARAMETERS[topic.argument] if is_free(each)] or ["name"])
    spec: dict[str, Any] = {"type": "string"}
    if rng.random() < 0.35:
        spec["description"] = rng.choice(["The {p}", "The {p}.", "{p}", "Name of the {p}"]).format(p=parameter)
    if rng.random() < 0.3:
        spec["title"] = parameter.title()
    parameters = schema({parameter: spec}, [parameter])
    if rng.random() < 0.3:
        parameters["additionalProperties"] = False
    spoken = " ".join(words)
    described = rng.choice(DONE.get(verb, DESCRIBED) if topic.questions in (ASK_FIND, ASK_SEND) else DESCRIBED)
    about = (
        described.format(n=spoken, N=spoken.capitalize(), an=an(spoken), a=an(topic.argument))
        if rng.random() < 0.85
        else ""
    )
    return Function(topic=topic, noun=spoken, parameter=parameter, tool=tool_of(name, about, parameters))


def offered(rng: random.Random) -> list[Function]:
    """One to three functions that are not alike."""
    found: list[Function] = []
    for _ in range(rng.choice([1, 2, 2, 2, 3])):
        new = small_function(rng)
        if not any(set(parts(new.name)) & set(parts(old.name)) - set(VERBS) for old in found):
            found.append(new)
    return found


def question_for(rng: random.Random, function: Function) -> Call:
    value = value_of(rng, function.topic.argument)
    text = rng.choice(function.topic.questions).format(x=value, n=function.noun, an=an(function.noun))
    text = text[0].upper() + text[1:] if rng.random() < 0.8 else text
    if rng.random() < 0.12:
        text = text.rstrip("?.")
    return Call(tool=function.tool, name=function.name, request=text, arguments={function.parameter: value})


def result_message(output: str) -> Message:
    return {"role": "tool", "tool_call_id": "call_1", "content": output}


def answered(rng: random.Random, call: Call) -> list[Message]:
    """A question that a call has answered; most clients send the call back without its reasoning."""
    output, reply = result_of(rng)
    return [user(call.request), call_message(call, rng.random() < 0.4), result_message(output), answer(reply)]


def direct(rng: random.Random, functions: list[Function]) -> Example:
    """A question for which none of the functions is: small talk, or a fact that no function gets."""
    nouns = {function.noun for function in functions}
    while rng.random() < 0.75:
        example = gen_facts.fact(rng)
        relation = example.key.partition(":")[0].removeprefix("by_")
        if not nouns & FACT_NOUNS or (relation and relation.removesuffix("s") not in nouns):
            return example
    return small_talk(rng)


def agent(rng: random.Random) -> Example:
    """One to three questions are answered; the next one ends in a call, in a result's answer, or in neither."""
    functions = offered(rng)
    before: list[Message] = []
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        if rng.random() < 0.12:
            before += finished(direct(rng, functions))
        else:
            before += answered(rng, question_for(rng, rng.choice(functions)))
    asked = {call["function"]["name"] for message in before for call in message.get("tool_calls", ())}
    unused = [function for function in functions if function.name not in asked]
    call = question_for(rng, rng.choice(unused if unused and rng.random() < 0.6 else functions))
    tools = [function.tool for function in functions]
    if rng.random() < 0.25:
        other = invented_call(rng, reserved=False)
        if not any(set(parts(other.name)) & set(parts(function.name)) for function in functions):
            tools.append(other.tool)
            call = other if rng.random() < 0.4 else call
    rng.shuffle(tools)
    low, roll = rng.random() < 0.12, rng.random()
    if roll < 0.15:
        example = direct(rng, functions)
        return Example(category="chat", messages=[*before, *example.messages], tools=tools, key="")
    if roll < 0.27:
        output, reply = result_of(rng)
        last = answer(reply, "" if low else "I have the result.")
        done = [user(call.request), call_message(call, not low and rng.random() < 0.5), result_message(output)]
        effort = "low" if low else "medium"
        return Example(category="results", messages=[*before, *done, last], tools=tools, key="", effort=effort)
    return as_example(call, tools, before, low)
