"""Small talk, honest refusals and remembering what the user said."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tools.tiny_models.data.chat_lines import ABOUT, OPEN_QUESTIONS, SMALL_TALK, TOPICS
from tools.tiny_models.data.example import Example, Message, answer, casual, user
from tools.tiny_models.data.holdout import is_held_out
from tools.tiny_models.data.tool_words import ARGUMENT_WORDS
from tools.tiny_models.data.words import common, entities, invented, person, rows, strange

LIMITS = (
    "I am a tiny model and cannot help with that. I know capitals, currencies, languages, chemical elements, "
    "simple arithmetic, sorting, reversing, spelling and units."
)
ECHO = [
    "Repeat: {x}", "repeat {x}", "Repeat after me: {x}", "Echo {x}", "Say exactly: {x}", "Copy this: {x}", "Write: {x}",
    "Please repeat {x}", "Type {x}", "Print {x}", "Repeat the words {x}", "Return this text: {x}",
]  # fmt: skip
COLOURS = "red blue green yellow black white purple orange pink brown grey gold silver".split()
FOODS = "pizza pasta rice soup bread cheese salad sushi curry tacos cake noodles apples honey".split()
ANIMALS = "cat dog horse tiger lion rabbit eagle owl fox bear wolf dolphin penguin snake".split()
CITIES = "Paris Berlin Tokyo London Madrid Rome Cairo Lima Oslo Delhi Boston Vienna Dublin Prague Sydney".split()
JOBS = "teacher doctor nurse baker farmer writer painter pilot cook driver engineer lawyer singer student".split()
# attribute: (ways to say it, ways to ask it, the reply to the statement, the answer); {v} is the value
MEMORY = {
    "name": (
        ["My name is {v}.", "I'm {v}.", "I am {v}.", "Call me {v}.", "Hi, my name is {v}.", "my name is {v}",
         "Hello, I am {v}.", "You can call me {v}.", "Hey, {v} here.", "The name is {v}.", "Hi, I'm {v}!"],
        ["What is my name?", "What's my name?", "Who am I?", "Do you remember my name?", "whats my name",
         "Tell me my name.", "What am I called?", "Can you say my name?", "Do you know my name?"],
        "Nice to meet you, {v}!", "Your name is {v}.",
    ),
    "colour": (
        ["My favourite colour is {v}.", "My favorite color is {v}.", "I like the color {v} best.",
         "I love {v}, it is my favorite color."],
        ["What is my favourite colour?", "What is my favorite color?", "Which color do I like best?"],
        "Noted: your favorite color is {v}.", "Your favorite color is {v}.",
    ),
    "food": (
        ["My favourite food is {v}.", "My favorite food is {v}.", "I like to eat {v}.", "I love eating {v}."],
        ["What is my favourite food?", "What is my favorite food?", "What do I like to eat?"],
        "Noted: you like to eat {v}.", "You like to eat {v}.",
    ),
    "animal": (
        ["My favourite animal is the {v}.", "My favorite animal is the {v}.",
         "I like the {v} more than any other animal."],
        ["What is my favourite animal?", "What is my favorite animal?", "Which animal do I like?"],
        "Noted: your favorite animal is the {v}.", "Your favorite animal is the {v}.",
    ),
    "city": (
        ["I live in {v}.", "My home is in {v}.", "I come from {v}.", "I am from {v}."],
        ["Where do I live?", "Where am I from?", "Which city do I live in?", "What is my city?"],
        "Noted: you live in {v}.", "You live in {v}.",
    ),
    "job": (
        ["I am a {v}.", "I work as a {v}.", "My job is {v}."],
        ["What is my job?", "What do I do for work?", "What do I work as?"],
        "Noted: you work as a {v}.", "You work as a {v}.",
    ),
    "age": (
        ["I am {v} years old.", "My age is {v}.", "I'm {v} years old."],
        ["How old am I?", "What is my age?", "Do you know how old I am?"],
        "Noted: you are {v} years old.", "You are {v} years old.",
    ),
    "number": (
        ["My lucky number is {v}.", "My favorite number is {v}.", "Remember the number {v}.",
         "The secret number is {v}."],
        ["What is my lucky number?", "What was the number?", "Which number did I tell you?", "What is my number?"],
        "Noted: the number is {v}.", "The number is {v}.",
    ),
    "pet": (
        ["My pet is called {v}.", "I have a dog called {v}.", "My cat is named {v}.", "My pet's name is {v}."],
        ["What is my pet called?", "What is the name of my pet?", "What is my pet's name?"],
        "Noted: your pet is called {v}.", "Your pet is called {v}.",
    ),
    "word": (
        ["The password is {v}.", "Remember the word {v}.", "The code word is {v}.", "The secret word is {v}."],
        ["What is the password?", "What was the word?", "What is the code word?", "Which word did I tell you?"],
        "Noted: the word is {v}.", "The word is {v}.",
    ),
}  # fmt: skip


def value(rng: random.Random, attribute: str) -> str:
    if attribute in ("name", "pet"):
        return person(rng)
    if attribute in ("age", "number"):
        return str(rng.randint(5, 99) if attribute == "age" else rng.randint(1, 9999))
    if attribute == "word":
        return strange(rng) if rng.random() < 0.5 else rng.choice(common("noun"))
    if attribute == "city" and rng.random() < 0.3:
        return invented(rng, 2).capitalize()
    return rng.choice({"colour": COLOURS, "food": FOODS, "animal": ANIMALS, "city": CITIES, "job": JOBS}[attribute])


def trained_value(rng: random.Random, attribute: str) -> str:
    """A value that is not reserved for the evals."""
    while True:
        told = value(rng, attribute)
        if not is_held_out("memory", told.lower()):
            return told


def memory(rng: random.Random, attribute: str = "", told: str = "", plain: bool = False) -> Example:
    """Tells one to three things, perhaps talks of something else, then asks for one of them."""
    attribute = attribute or (rng.choice(list(MEMORY)) if rng.random() < 0.6 else "name")
    told = told or trained_value(rng, attribute)
    others = rng.sample([name for name in MEMORY if name != attribute], rng.choice([0, 0, 1, 2]))
    facts = [(attribute, told), *((name, trained_value(rng, name)) for name in others)]
    rng.shuffle(facts)
    said, asked, _, recalled = MEMORY[attribute]
    question = rng.choice(asked) if plain else casual(rng, rng.choice(asked), 0.4)
    final = answer(recalled.format(v=told), f"The user said: {rng.choice(said[:1]).format(v=told)}")
    if rng.random() < 0.2:  # all in one message
        text = " ".join(rng.choice(MEMORY[name][0]).format(v=v) for name, v in facts) + " " + question
        return Example(category="memory", messages=[user(text), final], key=f"memory:{told.lower()}")
    turns: list[Message] = []
    for name, v in facts:
        turns += [user(rng.choice(MEMORY[name][0]).format(v=v)), answer(MEMORY[name][2].format(v=v))]
        if rng.random() < 0.3:
            turns += small_talk(rng).messages
    check = {"kind": "contains", "values": [told]}
    return Example(
        category="memory", messages=[*turns, user(question), final], key=f"memory:{told.lower()}", check=check
    )


def statement(rng: random.Random) -> Example:
    """The turn in which the user tells something, or asks for what was never told."""
    attribute = rng.choice(list(MEMORY)) if rng.random() < 0.5 else "name"
    said, asked, noted, _ = MEMORY[attribute]
    if rng.random() < 0.3:
        reply = "You have not told me yet."
        return Example(
            category="memory",
            messages=[user(casual(rng, rng.choice(asked), 0.4)), answer(reply, "The user did not say it.")],
            key="",
        )
    v = trained_value(rng, attribute)
    text = rng.choice(said).format(v=v)
    thought = f"The user tells me their {attribute}."
    return Example(category="memory", messages=[user(text), answer(noted.format(v=v), thought)], key="")


def small_talk(rng: random.Random) -> Example:
    """Greetings, thanks and questions about the model itself."""
    asked, reply = rng.choice(ABOUT if rng.random() < 0.5 else SMALL_TALK)
    messages = [user(casual(rng, rng.choice(asked), 0.6)), answer(reply, "Small talk.")]
    return Example(category="chat", messages=messages, key="")


def echo(rng: random.Random) -> Example:
    """Repeats words of any kind: what teaches to copy names that are never answers."""
    words = []
    for _ in range(rng.choice([1, 1, 2, 3, 4, 6, 8])):
        kind = rng.randrange(6)
        words.append(
            (
                rng.choice(common()), rng.choice(ARGUMENT_WORDS), strange(rng), person(rng), rng.choice(entities()),
                str(rng.randint(0, 9999)),
            )[kind]
        )  # fmt: skip
    text = rng.choice([" ", " ", ", ", "_"]).join(words)
    ask = rng.choice(ECHO).format(x=f'"{text}"' if rng.random() < 0.3 else text)
    return Example(category="echo", messages=[user(ask), answer(text, "I repeat it.")], key="")


def out_of_scope(rng: random.Random) -> Example:
    """Anything else: a short honest answer that names what the model can do."""
    roll = rng.random()
    topic = rng.choice(TOPICS if roll < 0.5 else common()) if roll < 0.8 else rng.choice(rows("countries"))["name"]
    other = rng.choice(common("noun"))
    text = rng.choice(OPEN_QUESTIONS).format(t=topic, n=other, p=person(rng), y=rng.randint(1900, 2030))
    messages = [user(casual(rng, text, 0.6)), answer(LIMITS, "I cannot do this.")]
    return Example(category="limits", messages=messages, key="")


def held_out_memory(seed: int) -> Iterator[Example]:
    """Endless conversations about names, numbers and words that training never used."""
    rng = random.Random(f"memory{seed}")
    seen: set[str] = set()
    while True:
        attribute = rng.choice(["name", "name", "pet", "word", "number"])
        told = value(rng, attribute)
        if is_held_out("memory", told.lower()) and told.lower() not in seen:
            seen.add(told.lower())
            item = memory(rng, attribute, told, plain=True)
            if item.check:
                yield item
