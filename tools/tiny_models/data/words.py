"""Words, names and invented words for the generators; reads facts/*.jsonl once."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

FACTS = Path(__file__).parent / "facts"
ONSETS = "b c d f g h j k l m n p r s t v w z br cl dr fl gr pl st tr sh ch th qu".split()
VOWELS = "a e i o u a e i o ai ee oo ou".split()
CODAS = ["", "", "", "n", "r", "l", "s", "t", "m", "k", "x", "nd", "rt", "sk", "p"]
FIRST_NAMES = (
    "Alice Bob Carol David Emma Frank Grace Henry Iris Jack Karen Leo Maria Nina Oscar Paul Quinn Rosa Sam Tina Uma "
    "Victor Wendy Xavier Yara Zoe Anna Ben Clara Daniel Elena Felix Gina Hugo Ivan Julia Kevin Laura Marco Nora Omar "
    "Petra Ravi Sara Tom Vera Walter Amir Bianca Chen Diego Eva Fatima Gabriel Hana Ibrahim Jana Kofi Lena Mateo Noah "
    "Olga Pedro Rita Sofia Tariq Ursula Vincent Wei Yusuf Zara Adam Bella Cyrus Dora Elias Flora Gustav Helen Igor "
    "Jonas Kira Liam Mila Nils Olivia Peter Ruth Simon Thea Viktor Willow Aiko Boris Chloe Dmitri Esther Finn Greta "
    "Hassan Ines Jorge Kaito Luca Mei Nadia Otto Priya Rafael Stella Theo Wanda Alex Chris Jordan Max Robin Taylor "
    "John James Mary Linda Susan Lisa Mark Steven Andrew Emily Joshua Ryan Jacob Megan Hannah Lucas Mia Ethan Ava"
).split()


@cache
def rows(name: str) -> tuple[dict[str, Any], ...]:
    """The rows of one facts file, without the line that names its sources."""
    lines = (FACTS / f"{name}.jsonl").read_text().splitlines()[1:]
    return tuple(json.loads(line) for line in lines)


@cache
def common(part: str = "") -> tuple[str, ...]:
    """Common English words, all or those of one part of speech (noun, verb, adj)."""
    return tuple(row["word"] for row in rows("words") if part in ("", row["part"]))


def invented(rng: random.Random, syllables: int = 2) -> str:
    """A pronounceable word that is in no dictionary."""
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(syllables))


def letters(rng: random.Random, length: int) -> str:
    """Random letters, for tasks that must not lean on known words."""
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))


@cache
def entities() -> tuple[str, ...]:
    """Names of countries, capitals and elements that are one word."""
    names = [row["name"] for row in rows("countries") + rows("elements")]
    names += [row["capital"] for row in rows("countries")]
    return tuple(name for name in names if name.isalpha())


def blended(rng: random.Random) -> str:
    """The start of one common word and the end of another: unusual, but made of usual pieces."""
    first, second = rng.choice(common()), rng.choice(common())
    return first[: rng.randint(2, 5)] + second[-rng.randint(2, 5) :]


def strange(rng: random.Random) -> str:
    """A word that is in no dictionary, of either kind."""
    return blended(rng) if rng.random() < 0.4 else invented(rng, rng.choice([1, 2, 2, 3]))


def some_word(rng: random.Random) -> str:
    """A word to spell or reverse: mostly real, sometimes invented, rarely random letters."""
    roll = rng.random()
    if roll < 0.5:
        return rng.choice(common())
    if roll < 0.57:
        return rng.choice(FIRST_NAMES)
    if roll < 0.67:
        return rng.choice(entities())
    if roll < 0.9:
        return strange(rng)
    return letters(rng, rng.randint(2, 8))


def person(rng: random.Random) -> str:
    """A first name, from the list or invented."""
    return rng.choice(FIRST_NAMES) if rng.random() < 0.6 else invented(rng, rng.choice([1, 2, 2, 3])).capitalize()
