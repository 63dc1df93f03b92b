"""Long conversations: something said far back is asked for at the end, with other talk or other notes between."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from tools.tiny_models.data.example import Example, Message, answer, casual, finished, user
from tools.tiny_models.data.gen_chat import MEMORY, small_talk, trained_value, value
from tools.tiny_models.data.gen_facts import fact
from tools.tiny_models.data.gen_units import units
from tools.tiny_models.data.holdout import is_held_out
from tools.tiny_models.data.words import common, strange

Weigh = Callable[[str], float]  # the length of a text in tokens
LONGEST = 3500  # tokens between the fact and the question; the context is 4,096
NOTES = ["Read these notes: {x} {q}", "Here are my notes. {x} {q}", "{x} {q}", "Notes: {x} Question: {q}"]
NOTE_ASK = ["What is the code of the {n}?", "Which code does the {n} have?", "Tell me the code of the {n}."]


def roughly(text: str) -> float:
    """Tokens of ordinary talk by its letters, for training, where the exact length does not matter."""
    return len(text) / 2.8


def roughly_noted(text: str) -> float:
    """The same for notes, which are full of numbers and invented words."""
    return len(text) / 2


def filler(rng: random.Random) -> list[Message]:
    """A finished exchange about something else."""
    return finished(rng.choice([fact, fact, units, small_talk])(rng))


def padded(rng: random.Random, far: float, weigh: Weigh) -> list[Message]:
    """Exchanges of at least `far` tokens."""
    turns: list[Message] = []
    while far > 0:
        more = filler(rng)
        far -= sum(weigh(message["content"]) + 2 for message in more)  # each turn has its marks
        turns += more
    return turns


def told_turns(rng: random.Random, attribute: str, told: str, far: float, weigh: Weigh) -> list[Message]:
    """The user tells something, talks of other things for `far` tokens, and asks for it."""
    said, asked, noted, recalled = MEMORY[attribute]
    before = padded(rng, rng.choice([0, 0, 40, 80]), weigh)
    tell = [user(rng.choice(said).format(v=told)), answer(noted.format(v=told))]
    last = answer(recalled.format(v=told), f"The user said: {said[0].format(v=told)}")
    return [*before, *tell, *padded(rng, far, weigh), user(rng.choice(asked)), last]


def note(thing: str, code: str) -> str:
    return f"The code of the {thing} is {code}."


def noted_list(rng: random.Random, told: str, far: float, weigh: Weigh) -> list[Message]:
    """One long message of notes alike; the wanted one stands `far` tokens before the question."""
    things = rng.sample(common("noun"), len(common("noun")))
    wanted = things.pop()

    def notes(size: float) -> list[str]:
        lines = []
        while size > 0 and things:
            lines.append(note(things.pop(), code(rng)))
            size -= weigh(lines[-1])
        return lines

    lines = [*notes(rng.uniform(0, 0.1) * far), note(wanted, told), *notes(far)]
    question = rng.choice(NOTE_ASK).format(n=wanted)
    asked = rng.choice(NOTES).format(x=" ".join(lines), q=question)
    return [user(asked), answer(note(wanted, told), f"The note says: {note(wanted, told)}")]


def code(rng: random.Random) -> str:
    """What a note tells; never a value that is reserved for the evals."""
    while True:
        told = str(rng.randint(100, 99999)) if rng.random() < 0.6 else strange(rng)
        if not is_held_out("memory", told.lower()):
            return told


def far_back(rng: random.Random) -> Example:
    """A training conversation of a few hundred to `LONGEST` tokens."""
    far = rng.uniform(0.05, 1) * LONGEST
    if rng.random() < 0.4:
        return Example(category="long", messages=noted_list(rng, code(rng), far, roughly_noted), key="")
    attribute = rng.choice(list(MEMORY))
    messages = told_turns(rng, attribute, trained_value(rng, attribute), far, roughly)
    if rng.random() < 0.4:
        messages[-2] = user(casual(rng, messages[-2]["content"], 0.6))
    return Example(category="long", messages=messages, key="")


def held_out(seed: int, weigh: Weigh, far: float = 3000) -> Iterator[Example]:
    """Endless conversations with a reserved value at least `far` tokens before the question, told and noted in turn."""
    rng = random.Random(f"long{seed}")
    seen: set[str] = set()
    while True:
        attribute = rng.choice(["name", "pet", "word", "number"])
        is_note = len(seen) % 3 == 2
        told = strange(rng) if is_note else value(rng, attribute)
        if not is_held_out("memory", told.lower()) or told.lower() in seen:
            continue
        seen.add(told.lower())
        turns = noted_list(rng, told, far, weigh) if is_note else told_turns(rng, attribute, told, far, weigh)
        check = {"kind": "contains", "values": [told]}
        yield Example(category="long", messages=turns, key=f"long:{told.lower()}", check=check)
