"""Sorting, reversing, spelling and counting."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tools.tiny_models.data.example import Example, answer, casual, spelled, user
from tools.tiny_models.data.holdout import is_held_out, list_key
from tools.tiny_models.data.words import common, letters, some_word

SORT_UP = [
    "Sort these numbers: {x}", "sort {x}", "Sort {x} in ascending order.", "Put {x} in order.", "Order {x}.",
    "Sort from smallest to largest: {x}", "Please sort {x} from small to large.", "Arrange {x} in ascending order.",
    "Sort the list {x}.", "Can you sort {x}?", "Order these numbers from smallest to largest: {x}", "sort: {x}",
]  # fmt: skip
SORT_DOWN = [
    "Sort {x} in descending order.", "Sort from largest to smallest: {x}", "Order {x} from large to small.",
    "Sort these numbers from largest to smallest: {x}", "Put {x} in descending order.", "sort {x} descending",
]  # fmt: skip
SORT_WORDS = [
    "Sort these words: {x}", "Sort {x} alphabetically.", "Put these words in alphabetical order: {x}", "sort {x}",
    "Sort the words {x}.", "Order alphabetically: {x}", "Alphabetize {x}.", "Sort the list {x}.", "Order {x}.",
]  # fmt: skip
REVERSE_WORD = [
    "Reverse the word {x}.", "Reverse {x}", "Spell {x} backwards.", "Write {x} backwards.", "reverse: {x}",
    "What is {x} backwards?", "What is {x} spelled backwards?", "Reverse the string {x}.", "{x} in reverse",
    "Can you reverse {x}?", "Write the word {x} in reverse.", "Reverse the letters of {x}.", "{x} backwards",
]  # fmt: skip
REVERSE_LIST = [
    "Reverse the list {x}.", "Reverse this list: {x}", "Reverse the order of {x}.", "reverse {x}",
    "Put {x} in reverse order.", "Write {x} in reverse order.", "Can you reverse the list {x}?",
]  # fmt: skip
SPELL = [
    "Spell {x}.", "How do you spell {x}?", "Spell the word {x}.", "spell {x}", "Spell out {x}.", "How is {x} spelled?",
]  # fmt: skip
KINDS = ["spell", "spell", "several", "several", "several", "length", "letter", "letter", "up", "down", "items"]
SPELL_SEVERAL = ["Spell these words: {x}", "Spell {x}.", "spell {x}", "Spell the words {x}.", "Spell each word: {x}"]
LENGTH = [
    "How many letters are in {x}?", "How many letters does {x} have?", "Count the letters in {x}.", "length of {x}",
    "How long is the word {x}?", "How many letters are there in the word {x}?",
]  # fmt: skip
LETTER = [
    "How many {c}'s are in {x}?", "How many times does {c} appear in {x}?", "Count the letter {c} in {x}.",
    "How many {c} are in {x}?", "How often does the letter {c} occur in {x}?", "how many {c}s in {x}",
]  # fmt: skip
COUNT = ["Count from {a} to {b}.", "count {a} to {b}", "List the numbers from {a} to {b}.", "Count up from {a} to {b}."]
COUNT_DOWN = ["Count down from {b} to {a}.", "Count backwards from {b} to {a}.", "count down {b} to {a}"]
ITEMS = ["How many items are in the list {x}?", "How many words are here: {x}", "Count the items: {x}"]


def quoted(rng: random.Random, word: str) -> str:
    roll = rng.random()
    return f'"{word}"' if roll < 0.15 else f"'{word}'" if roll < 0.22 else word


def shown(rng: random.Random, items: list[str]) -> str:
    """A list as people type it."""
    roll = rng.random()
    if roll < 0.7:
        return ", ".join(items)
    if roll < 0.85:
        return " ".join(items)
    if roll < 0.95:
        return ", ".join(items[:-1]) + " and " + items[-1]
    return "[" + ", ".join(items) + "]"


def numbers(rng: random.Random) -> list[int]:
    """Distinct numbers below 1000, sometimes all of one size."""
    high = rng.choice([10, 20, 100, 100, 1000, 1000])
    return rng.sample(range(high), rng.randint(3, 8 if high > 10 else 6))


def sort_numbers(rng: random.Random, items: list[int], down: bool = False, text: str = "") -> Example:
    ordered = sorted(items, reverse=down)
    sizes = sorted({len(str(n)) for n in items}, reverse=down)
    groups = [f"{size}: " + ", ".join(str(n) for n in ordered if len(str(n)) == size) for size in sizes]
    thought = ("largest first. " if down else "smallest first. ") + ". ".join(groups)
    phrase = rng.choice(SORT_DOWN if down else SORT_UP)
    text = text or casual(rng, phrase.format(x=shown(rng, [str(n) for n in items])), share=0.4)
    reply = ", ".join(str(n) for n in ordered)
    check = {"kind": "list", "items": [str(n) for n in ordered]}
    return Example(
        category="sorting", messages=[user(text), answer(reply, thought)], key=f"sort:{list_key(items)}", check=check
    )


def by_letter(words: list[str], depth: int = 0) -> str:
    """Sorting by one letter after the other: '(b bud, a ant, b bat) = ant (u bud, a bat) = bat = bud'."""
    if len(words) == 1:
        return f"= {words[0]}"
    shown_words = ", ".join(f"{word[depth] if depth < len(word) else '-'} {word}" for word in words)
    groups: dict[str, list[str]] = {}
    for word in words:
        groups.setdefault(word[depth : depth + 1], []).append(word)
    return " ".join([f"({shown_words})", *(by_letter(groups[letter], depth + 1) for letter in sorted(groups))])


def sort_words(rng: random.Random, items: list[str], text: str = "") -> Example:
    ordered = sorted(items)
    text = text or casual(rng, rng.choice(SORT_WORDS).format(x=shown(rng, items)), share=0.4)
    check = {"kind": "list", "items": ordered}
    return Example(
        category="sorting", messages=[user(text), answer(", ".join(ordered), by_letter(items))],
        key=f"sort:{list_key(items)}", check=check,
    )  # fmt: skip


def sample_words(rng: random.Random, neighbours: float = 0.15) -> list[str]:
    """Words; a share of the lists, `neighbours`, has neighbours in the alphabet: the first letter does not decide."""
    items = rng.sample(common(), rng.randint(3, 6))
    if rng.random() < neighbours:
        start = rng.randrange(len(common()) - 60)
        items = rng.sample(sorted(common())[start : start + 60], len(items))
    return items


def sorting(rng: random.Random) -> Example:
    while True:
        if rng.random() < 0.55:
            items = numbers(rng)
            if not is_held_out("sort", list_key(items)):
                return sort_numbers(rng, items, down=rng.random() < 0.25)
        else:
            words = sample_words(rng, neighbours=0.35)
            if not is_held_out("sort", list_key(words)):
                return sort_words(rng, words)


def reverse_word(rng: random.Random, word: str, text: str = "") -> Example:
    backwards = word[::-1]
    text = text or casual(rng, rng.choice(REVERSE_WORD).format(x=quoted(rng, word)), share=0.35)
    thought = f"{spelled(' '.join(word))} reversed is {spelled(' '.join(backwards))}"
    return Example(
        category="reversing", messages=[user(text), answer(spelled(backwards), thought)],
        key=f"reverse:{word.lower()}", check={"kind": "text", "value": backwards},
    )  # fmt: skip


def reverse_list(rng: random.Random, items: list[str], text: str = "") -> Example:
    backwards = items[::-1]
    text = text or casual(rng, rng.choice(REVERSE_LIST).format(x=shown(rng, items)), share=0.35)
    return Example(
        category="reversing", messages=[user(text), answer(", ".join(backwards), "Last to first.")],
        key=f"reverse:{list_key(items)}", check={"kind": "list", "items": backwards},
    )  # fmt: skip


def list_items(rng: random.Random) -> list[str]:
    if rng.random() < 0.5:
        return [str(n) for n in rng.sample(range(rng.choice([10, 100, 1000])), rng.randint(3, 7))]
    return rng.sample(common(), rng.randint(3, 6))


def reverse_target(rng: random.Random) -> str:
    return str(rng.randint(100, 99999)) if rng.random() < 0.1 else some_word(rng)


def reversing(rng: random.Random) -> Example:
    while True:
        if rng.random() < 0.65:
            word = reverse_target(rng)
            if not is_held_out("reverse", word.lower()):
                return reverse_word(rng, word)
        else:
            items = list_items(rng)
            if not is_held_out("reverse", list_key(items)):
                return reverse_list(rng, items)


def counting(rng: random.Random) -> Example:
    """Spelling, letters in a word, and counting up, down and over a list."""
    kind = rng.choice(KINDS)
    if kind in ("up", "down"):
        a = rng.choice([0, 1, 1, rng.randint(0, 200)])
        b = a + rng.randint(2, 20)
        row = list(range(a, b + 1)) if kind == "up" else list(range(b, a - 1, -1))
        text = rng.choice(COUNT if kind == "up" else COUNT_DOWN).format(a=a, b=b)
        reply, thought = ", ".join(map(str, row)), f"From {row[0]} to {row[-1]}."
    elif kind == "several":
        items = [some_word(rng) for _ in range(rng.randint(3, 8))]
        text = rng.choice(SPELL_SEVERAL).format(x=", ".join(items))
        reply, thought = ", ".join(spelled("-".join(word.upper())) for word in items), "Letter by letter."
    elif kind == "items":
        items = rng.sample(common(), rng.randint(2, 9))
        text = rng.choice(ITEMS).format(x=", ".join(items))
        thought = ", ".join(f"{n} {word}" for n, word in enumerate(items, 1))
        reply = f"There are {len(items)} items."
    else:
        return about_letters(rng, kind)
    return Example(category="counting", messages=[user(casual(rng, text, 0.4)), answer(reply, thought)], key="")


def about_letters(rng: random.Random, kind: str) -> Example:
    word = some_word(rng)
    subject = quoted(rng, word)
    if kind == "spell":
        text = rng.choice(SPELL).format(x=subject)
        thought, reply = spelled(" ".join(word)), spelled("-".join(word.upper()))
    elif kind == "length":
        text = rng.choice(LENGTH).format(x=subject)
        thought = ", ".join(f"{n} {letter}" for n, letter in enumerate(word, 1))
        reply = f"{word} has {len(word)} letter" + ("." if len(word) == 1 else "s.")
    else:
        letter = rng.choice(word.lower()) if rng.random() < 0.8 else letters(rng, 1)
        count, marks = 0, []
        for each in word:
            count += each.lower() == letter
            marks.append(f"{each} {count}" if each.lower() == letter else each)
        text = rng.choice(LETTER).format(x=subject, c=letter)
        thought = ", ".join(marks) + f". So {count}"
        reply = f"The letter {letter} appears {count} time" + ("" if count == 1 else "s") + f" in {word}."
    share = 0.0 if subject != subject.lower() else 0.4
    return Example(category="counting", messages=[user(casual(rng, text, share)), answer(reply, thought)], key="")


def held_out_sorting(seed: int) -> Iterator[Example]:
    """Endless unseen lists, numbers and words in turn."""
    rng = random.Random(f"sort{seed}")
    seen: set[str] = set()
    while True:
        items: list[int] | list[str] = numbers(rng) if rng.random() < 0.55 else sample_words(rng)
        key = list_key(items)
        if is_held_out("sort", key) and key not in seen:
            seen.add(key)
            if isinstance(items[0], int):
                down = rng.random() < 0.25
                text = rng.choice(SORT_DOWN if down else SORT_UP).format(x=", ".join(map(str, items)))
                yield sort_numbers(rng, [int(n) for n in items], down, text)
            else:
                text = rng.choice(SORT_WORDS[:4]).format(x=", ".join(map(str, items)))
                yield sort_words(rng, [str(word) for word in items], text)


def held_out_reversing(seed: int) -> Iterator[Example]:
    """Endless unseen words and lists."""
    rng = random.Random(f"reverse{seed}")
    seen: set[str] = set()
    while True:
        if rng.random() < 0.6:
            word = reverse_target(rng)
            if is_held_out("reverse", word.lower()) and word.lower() not in seen:
                seen.add(word.lower())
                yield reverse_word(rng, word, rng.choice(REVERSE_WORD).format(x=word))
        else:
            items = list_items(rng)
            key = list_key(items)
            if is_held_out("reverse", key) and key not in seen:
                seen.add(key)
                yield reverse_list(rng, items, rng.choice(REVERSE_LIST).format(x=", ".join(items)))
