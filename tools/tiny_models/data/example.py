"""The record that every generator makes, and the casual wording that all of them share."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
# Private-use characters around a span that is written letter by letter, so that unusual words need no rare tokens.
SPELL_OPEN, SPELL_CLOSE = "\ue000", "\ue001"


@dataclass(frozen=True, kw_only=True)
class Example:
    """One conversation; the last message is the assistant's answer, the only one that is trained.

    check: how the evals score an answer (see evals/scoring.py). key: what must not be in both sides of the split.
    forced: what a grammar writes at the start of the answer, so that neither it nor the thought before it is trained.
    """

    category: str
    messages: list[Message]
    key: str
    check: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    effort: str = "medium"
    forced: str = ""


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str, reasoning: str = "") -> Message:
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning"] = reasoning
    return message


def spelled(text: str) -> str:
    """Marks text that the tokenizer writes one letter at a time."""
    return f"{SPELL_OPEN}{text}{SPELL_CLOSE}"


def unmark(text: str) -> str:
    return text.replace(SPELL_OPEN, "").replace(SPELL_CLOSE, "")


def finished(example: Example) -> list[Message]:
    """An exchange as it stands in a later prompt: no thought, no letter-by-letter marks."""
    turns = []
    for message in example.messages:
        kept = {key: value for key, value in message.items() if key != "reasoning"}
        turns.append(kept | {"content": unmark(kept["content"])})
    return turns


OPENERS = [
    "please tell me ", "can you tell me ", "could you tell me ", "tell me ", "do you know ", "hey, ", "hi, ",
    "hello! ", "quick question: ", "question: ", "I want to know ", "I'd like to know ", "please, ", "ok, ", "so, ",
    "hi there, ", "Hello, ", "one more: ", "help me: ", "I wonder, ", "just curious, ", "next: ", "now ", "well, ",
]  # fmt: skip
CLOSERS = [" please", ", please", " thanks", ", thank you", " :)", ", if you know", " today", ", quickly", "!", "..."]


SLIPS = {
    "what": ["wat", "waht", "wht", "whta"], "What": ["Waht", "Wat", "Whta"], "is": ["iz", "si"], "the": ["teh", "th",
    "hte"],
    "please": ["pls", "plz", "plese"], "you": ["u", "yuo"], "are": ["r", "aer"], "capital": ["captial", "capitol",
    "captal"],
    "currency": ["curency", "currancy"], "language": ["langauge", "lang"], "does": ["dose", "do"], "number": ["nr",
    "numbr"],
    "which": ["wich", "whcih"], "Which": ["Wich", "Whihc"], "spoken": ["spokn"], "symbol": ["symbl", "simbol"],
    "country": ["contry", "counrty"], "sort": ["srot"], "reverse": ["revers"], "of": ["fo", "off"], "my": ["mi"],
}  # fmt: skip


def slip(rng: random.Random, text: str) -> str:
    """One or two typing mistakes in words that carry no name or number."""
    words = text.split(" ")
    for index, word in enumerate(words):
        if word in SLIPS and rng.random() < 0.5:
            words[index] = rng.choice(SLIPS[word])
    return " ".join(words)


def casual(rng: random.Random, text: str, share: float = 0.6) -> str:
    """Rewrites a question the way people type: openers, lower case, missing punctuation, doubled marks."""
    if rng.random() > share:
        return text
    if rng.random() < 0.35:
        first = text[0].lower() if len(text) > 1 and text[1].islower() else text[0]
        text = rng.choice(OPENERS) + first + text[1:]
        if rng.random() < 0.5:
            text = text[0].upper() + text[1:]
    if rng.random() < 0.15:
        text = text.rstrip("?.") + rng.choice(CLOSERS) + rng.choice(["", "?", "."])
    if rng.random() < 0.08:
        text = slip(rng, text)
    roll = rng.random()
    if roll < 0.35:
        text = text.rstrip("?.!")
    elif roll < 0.40:
        text = text.rstrip("?.!") + rng.choice([" ?", "??", ".", "!", "?!", " "])
    if rng.random() < 0.3:
        text = text.lower()
    elif rng.random() < 0.04:
        text = text.upper()
    return text


def joined(names: list[str]) -> str:
    """English enumeration: 'a', 'a and b', 'a, b and c'."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def an(noun: str) -> str:
    """The noun with its article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
