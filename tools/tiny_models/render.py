"""Renders conversations through the bundled chat template and turns them into token ids with a loss mask."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment
from tokenizers import Tokenizer

from tools.tiny_models.example import SPELL_CLOSE, SPELL_OPEN, Example, Message

ASSETS = Path(__file__).resolve().parents[2] / "assets" / "tiny-gpt-oss"
GENERATION_PROMPT = "<|start|>assistant"


def raise_exception(message: str) -> None:
    raise ValueError(message)


def to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


@cache
def template() -> Any:
    """The template, compiled the way transformers does it."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True)  # our own template: no sandbox needed
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string((ASSETS / "chat_template.jinja").read_text())


def render(messages: list[Message], add_generation_prompt: bool = False, **extra: Any) -> str:
    """The Harmony text of a conversation; `extra` takes tools and reasoning_effort."""
    text: str = template().render(messages=messages, add_generation_prompt=add_generation_prompt, **extra)
    return text


def prompt_of(example: Example) -> str:
    """What a server would send to the model."""
    return render(
        example.messages[:-1], add_generation_prompt=True, tools=example.tools, reasoning_effort=example.effort
    )


def starts_in(message: Message) -> int:
    """How many Harmony messages the template makes of one assistant message."""
    thought = any(message.get(key) for key in ("reasoning", "reasoning_content", "thinking"))
    calls = len(message.get("tool_calls") or [])
    return int(thought) + calls + int(not calls or bool(message.get("content")))


def prompt_and_target(example: Example) -> tuple[str, str]:
    """The prompt and what the model must write after it, letter-by-letter marks included. One rendering, cut in two."""
    full = render(example.messages, tools=example.tools, reasoning_effort=example.effort)
    cut = len(full)
    for _ in range(starts_in(example.messages[-1])):
        cut = full.rindex(GENERATION_PROMPT, 0, cut)
    cut += len(GENERATION_PROMPT)
    return full[:cut], full[cut:]


class Encoder:
    """Token ids of rendered text. Special tokens end a piece, so pieces are encoded alone and repeated ones kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {token: number for token, number in tokenizer.get_vocab().items() if token.startswith("<|")}
        self._kept: dict[str, list[int]] = {}

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def text(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in re.split(r"(<\|[a-z]+\|>)", text):
            if piece in self._special:
                ids.append(self._special[piece])
            elif piece:
                ids += self._piece(piece)
        return ids

    def _piece(self, piece: str) -> list[int]:
        found = self._kept.get(piece)
        if found is None:
            found = self._tokenizer.encode(piece, add_special_tokens=False).ids
            if len(self._kept) < 20000 and len(piece) < 200:
                self._kept[piece] = found
        return found

    def target(self, target: str) -> list[int]:
        """Text between the marks is written one letter at a time."""
        ids: list[int] = []
        for number, part in enumerate(re.split(f"[{SPELL_OPEN}{SPELL_CLOSE}]", target)):
            if number % 2:
                for letter in part:
                    ids += self._piece(letter)
            else:
                ids += self.text(part)
        return ids

    def example(self, example: Example) -> tuple[list[int], int]:
        """Token ids of the whole conversation and how many of them are prompt."""
        prompt, target = prompt_and_target(example)
        prompt_ids = self.text(prompt)
        return prompt_ids + self.target(target), len(prompt_ids)


def load_encoder(path: Path = ASSETS / "tokenizer.json") -> Encoder:
    return Encoder(Tokenizer.from_file(str(path)))


def plain_text(example: Example) -> str:
    """The whole conversation without what is written letter by letter, for training the tokenizer."""
    return re.sub(f"{SPELL_OPEN}[^{SPELL_CLOSE}]*{SPELL_CLOSE}", "", "".join(prompt_and_target(example)))
