"""Questions about countries, elements and words, from facts/*.jsonl."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from tools.tiny_models.data import phrasings
from tools.tiny_models.data.example import Example, answer, casual, joined, user
from tools.tiny_models.data.words import common, invented, rows

COUNTRY_RELATIONS = ("capital", "currency", "languages", "continent", "capital_of")
ELEMENT_RELATIONS = ("symbol", "number", "by_symbol", "by_number")
UNKNOWN = "I do not know that. I am a tiny model."


def country_name(country: dict[str, Any]) -> str:
    return ("the " if country["article"] else "") + str(country["name"])


def sentence(relation: str, row: dict[str, Any]) -> tuple[str, str, list[str]]:
    """The answer, the short thought before it, and the strings a right answer contains."""
    if relation == "definition":
        text = f"{row['word']}: {row['definition']}"
        return f"{text}.", f"Definition of {row['word']}.", [row["definition"]]
    if relation in ELEMENT_RELATIONS:
        name, symbol, number = row["name"], row["symbol"], str(row["number"])
        thought = f"{name}: {symbol}, {number}"
        return {
            "symbol": (f"The chemical symbol of {name} is {symbol}.", thought, [symbol]),
            "number": (f"The atomic number of {name} is {number}.", thought, [number]),
            "by_symbol": (f"{symbol} is the chemical symbol of {name}.", thought, [name]),
            "by_number": (f"Element {number} is {name}.", thought, [name]),
        }[relation]
    name = country_name(row)
    start = name[0].upper() + name[1:]
    if relation == "languages":
        spoken = row["languages"]
        subject = "language of" if len(spoken) == 1 else "languages of"
        verb = "is" if len(spoken) == 1 else "are"
        text = f"The official {subject} {name} {verb} {joined(spoken)}."
        return text, f"languages of {name}: {joined(spoken)}", list(spoken)
    value = row["capital" if relation == "capital_of" else relation]
    return {
        "capital": (f"The capital of {name} is {value}.", f"capital of {name}: {value}", [value]),
        "currency": (f"The currency of {name} is the {value}.", f"currency of {name}: {value}", [value]),
        "continent": (f"{start} is in {value}.", f"continent of {name}: {value}", [value]),
        "capital_of": (f"{value} is the capital of {name}.", f"{value}: capital of {name}", [row["name"]]),
    }[relation]


def subject_of(relation: str, row: dict[str, Any], rng: random.Random | None) -> str:
    """What the question names. With an rng sometimes an alias, or the name without its article."""
    if relation == "definition":
        return f'"{row["word"]}"' if rng and rng.random() < 0.2 else str(row["word"])
    if relation in ("symbol", "number"):
        return str(row["name"])
    if relation == "by_symbol":
        return str(row["symbol"])
    if relation == "by_number":
        return str(row["number"])
    if relation == "capital_of":
        return str(row["capital"])
    if rng and row["aliases"] and rng.random() < 0.35:
        return str(rng.choice(row["aliases"]))
    return str(row["name"]) if rng and rng.random() < 0.3 else country_name(row)


def ask(relation: str, row: dict[str, Any], phrase: str, rng: random.Random | None = None) -> Example:
    """One question in one phrasing; with an rng the wording becomes casual."""
    subject = subject_of(relation, row, rng)
    if relation == "by_symbol":
        # The case of a symbol carries meaning (Co, CO): only the words around it become casual.
        text = re.sub(r"\{x\}", subject, casual(rng, phrase) if rng else phrase, flags=re.IGNORECASE)
    else:
        text = phrase.format(x=subject)
        text = text[0].upper() + text[1:] if phrase[:3] == "{x}" and not rng else text
        text = casual(rng, text) if rng else text
    if rng and rng.random() < 0.06:  # words that have nothing to do with the question must not change the answer
        noise = " ".join(rng.choice(common()) for _ in range(rng.randint(1, 3)))
        text = noise.capitalize() + rng.choice([": ", ", ", ". ", "? ", " "]) + text
    reply, thought, values = sentence(relation, row)
    category = "definitions" if relation == "definition" else "facts"
    key = f"{relation}:{row.get('iso') or row.get('symbol') or row.get('word')}:{phrase}"
    check = {"kind": "contains", "values": values}
    return Example(category=category, messages=[user(text), answer(reply, thought)], key=key, check=check)


@cache
def pool(relation: str) -> tuple[dict[str, Any], ...]:
    """The rows a relation can be asked about; a capital's country only where the capital names one country."""
    if relation == "definition":
        return rows("definitions")
    return rows("elements" if relation in ELEMENT_RELATIONS else "countries")


def fact(rng: random.Random) -> Example:
    """A training question about a country or an element."""
    relation = rng.choices([*COUNTRY_RELATIONS, *ELEMENT_RELATIONS], weights=[26, 18, 18, 12, 10, 12, 12, 8, 8], k=1)[0]
    if rng.random() < 0.03:
        return unknown_fact(rng)
    if rng.random() < 0.03:
        return overview(rng)
    return ask(relation, rng.choice(pool(relation)), phrasings.trained(relation, rng), rng)


def definition(rng: random.Random) -> Example:
    """A training question for the meaning of a word."""
    if rng.random() < 0.1:
        word = invented(rng, rng.choice([2, 3]))
        text = casual(rng, phrasings.trained("definition", rng).format(x=word))
        last = answer(UNKNOWN, "I do not know this word.")
        return Example(category="definitions", messages=[user(text), last], key="")
    return ask("definition", rng.choice(rows("definitions")), phrasings.trained("definition", rng), rng)


def unknown_fact(rng: random.Random) -> Example:
    """A question about a country that does not exist: the honest answer is that the model does not know."""
    relation = rng.choice(["capital", "currency", "languages", "continent"])
    name = invented(rng, rng.choice([2, 2, 3])).capitalize()
    text = casual(rng, phrasings.trained(relation, rng).format(x=name))
    return Example(category="facts", messages=[user(text), answer(UNKNOWN, f"I do not know {name}.")], key="")


def overview(rng: random.Random) -> Example:
    """'Tell me about France' and yes-or-no questions."""
    row = rng.choice(rows("countries"))
    name = country_name(row)
    if rng.random() < 0.5:
        other = rng.choice(rows("countries"))["capital"] if rng.random() < 0.6 else row["capital"]
        question = rng.choice(["Is {c} the capital of {x}?", "{c} is the capital of {x}, right?"])
        text = casual(rng, question.format(c=other, x=name))
        reply = sentence("capital", row)[0]
        reply = ("Yes. " if other == row["capital"] else "No. ") + reply
        thought = f"capital of {name}: {row['capital']}"
        return Example(category="facts", messages=[user(text), answer(reply, thought)], key="")
    questions = ["Tell me about {x}.", "What do you know about {x}?", "Facts about {x}?", "Describe {x}."]
    text = casual(rng, rng.choice(questions).format(x=name))
    parts = [sentence(relation, row)[0] for relation in ("continent", "capital", "currency", "languages")]
    return Example(
        category="facts", messages=[user(text), answer(" ".join(parts), f"What I know about {name}.")], key=""
    )


def held_out() -> Iterator[Example]:
    """Every entity and relation in every unseen phrasing."""
    for relation, phrases in phrasings.HELD_OUT.items():
        for row in pool(relation):
            for phrase in phrases:
                yield ask(relation, row, phrase)
