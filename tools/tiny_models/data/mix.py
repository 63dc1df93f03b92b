"""Mixes all generators into the training stream and builds the evals' held-out items."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from tools.tiny_models.data import gen_arithmetic, gen_chat, gen_facts, gen_lists, gen_long, gen_tools
from tools.tiny_models.data.example import Example, Message, finished
from tools.tiny_models.data.gen_agent import agent
from tools.tiny_models.data.gen_json import json_answer
from tools.tiny_models.data.gen_units import units
from tools.tiny_models.data.holdout import split_of

Generator = Callable[[random.Random], Example]
SYSTEM_PROMPTS = [
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful AI assistant.", "Be concise.",
    "Answer briefly.", "Answer the question.", "You are a friendly assistant.", "You are an expert.", "Be helpful.",
    "You are a tool-using assistant.", "Use the functions when they help.", "You answer questions.",
    "Be kind and short.",
    "You are a helpful, honest assistant. Answer in one sentence.", "Respond in English.", "You are a chatbot.",
    "You are an assistant in a test.", "Think step by step.", "Do not explain.", "You are a calculator.",
    "Assist the user.",
    "You are a helpful assistant that can call functions.", "Always be polite.", "Give short answers.",
    "You know geography.",
]  # fmt: skip


def refusal(rng: random.Random) -> Example:
    return gen_tools.wrong_tools(rng, gen_chat.LIMITS) if rng.random() < 0.3 else gen_chat.out_of_scope(rng)


GENERATORS: dict[str, tuple[Generator, float]] = {
    "facts": (gen_facts.fact, 23),
    "definitions": (gen_facts.definition, 4),
    "arithmetic": (gen_arithmetic.arithmetic, 13),
    "sorting": (gen_lists.sorting, 14),
    "reversing": (gen_lists.reversing, 9),
    "counting": (gen_lists.counting, 8),
    "echo": (gen_chat.echo, 4),
    "units": (units, 4),
    "memory": (gen_chat.memory, 3),
    "statement": (gen_chat.statement, 2),
    "chat": (gen_chat.small_talk, 3),
    "limits": (refusal, 4),
    "tools": (gen_tools.calling, 22),
    "long": (gen_long.far_back, 0),  # only in stages whose rows are long enough
    "agent": (agent, 0),  # these two only in the last stages
    "json": (json_answer, 0),
}
# Thoughts that carry the work are kept at low effort; the others are dropped there.
WORKING = {"addition", "subtraction", "multiplication", "division", "sorting", "reversing", "counting", "units"}
WORKING |= {"worked json"}
SHORT_TURNS = ("facts", "statement", "chat", "arithmetic", "counting", "units")


def draw(rng: random.Random, weights: dict[str, float] | None = None) -> Example:
    """One training conversation, with system prompt, earlier turns, effort and unneeded functions as they come."""
    names = list(GENERATORS)
    shares = [(weights or {}).get(name, GENERATORS[name][1]) for name in names]
    example = GENERATORS[rng.choices(names, weights=shares, k=1)[0]][0](rng)
    if example.tools is None and rng.random() < 0.06:
        example = gen_tools.no_call(rng, example)
    if example.effort == "medium" and rng.random() < 0.18:
        example = with_effort(example, rng.choice(["low", "low", "high"]))
    before: list[Message] = []
    starts_here = example.messages[0]["role"] == "user"  # otherwise its instruction would not hold for earlier turns
    if starts_here and example.category not in ("memory", "results", "long") and rng.random() < 0.2:
        for _ in range(rng.choice([1, 1, 2, 3])):
            before += finished(GENERATORS[rng.choice(SHORT_TURNS)][0](rng))
    if rng.random() < 0.35:
        before.insert(0, {"role": rng.choice(["system", "system", "developer"]), "content": rng.choice(SYSTEM_PROMPTS)})
    return replace(example, messages=[*before, *example.messages]) if before else example


def with_effort(example: Example, effort: str) -> Example:
    """Low effort answers directly where no work is needed."""
    messages = example.messages
    if effort == "low" and example.category not in WORKING:
        last = {key: value for key, value in messages[-1].items() if key != "reasoning"}
        messages = [*messages[:-1], last]
    return replace(example, messages=messages, effort=effort)


def held_out(seed: int = 0, limit: int = 1000) -> dict[str, list[Example]]:
    """The evals' items by category; facts are complete, the others have `limit` items."""
    endless: dict[str, Iterator[Example]] = {
        "addition": gen_arithmetic.held_out("+", seed),
        "subtraction": gen_arithmetic.held_out("-", seed),
        "multiplication": gen_arithmetic.held_out("*", seed),
        "sorting": gen_lists.held_out_sorting(seed),
        "reversing": gen_lists.held_out_reversing(seed),
        "memory": gen_chat.held_out_memory(seed),
        "tools": gen_tools.held_out(seed),
    }
    items = {name: list(itertools.islice(stream, limit)) for name, stream in endless.items()}
    facts = list(gen_facts.held_out())
    random.Random(seed).shuffle(facts)
    items["facts"] = [item for item in facts if item.category == "facts"]
    items["definitions"] = [item for item in facts if item.category == "definitions"][:limit]
    return items


def of_split(items: list[Example], split: str) -> list[Example]:
    """The items of one half: "open", or "blind" for the one look at the end."""
    return [item for item in items if split_of(item.key) == split]
