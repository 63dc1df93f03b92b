"""`Dialect`: how a family writes conversations: chat template, tokenizer, prompts and targets, reading answers."""

from __future__ import annotations

import json
import random
import re
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment
from tokenizers import Tokenizer

from tools.tiny_models.data.example import SPELL_CLOSE, SPELL_OPEN, Example, Message


def raise_exception(message: str) -> None:
    raise ValueError(message)


def to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


class Dialect(ABC):
    """Reads chat_template.jinja and tokenizer.json of one folder."""

    stop: tuple[str, ...]  # the model's turn ends with one of these
    modes: tuple[str, ...]  # of reasoning, for evaluations; see `in_mode`
    bos_token = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def template(self) -> Any:
        """The template, compiled the way transformers does it."""
        environment = Environment(trim_blocks=True, lstrip_blocks=True)  # our own template: no sandbox needed
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = raise_exception
        return environment.from_string((self.folder / "chat_template.jinja").read_text())

    def render(self, messages: list[Message], add_generation_prompt: bool = False, **extra: Any) -> str:
        """The text of a conversation; `extra` takes tools and the family's template variables."""
        text: str = self.template.render(
            messages=messages, add_generation_prompt=add_generation_prompt, bos_token=self.bos_token, **extra
        )
        return text

    @abstractmethod
    def variables(self, example: Example) -> dict[str, Any]:
        """The template's variables for an example, tools included."""

    def prompt(self, example: Example) -> str:
        """What a server would send to the model."""
        return self.render(example.messages[:-1], add_generation_prompt=True, **self.variables(example))

    @abstractmethod
    def prompt_and_target(self, example: Example) -> tuple[str, str]:
        """The prompt and what the model must write after it, letter-by-letter marks included."""

    @abstractmethod
    def read(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        """The content and the calls (name, JSON) in what the model wrote; a malformed answer gives neither."""

    def adapted(self, rng: random.Random, example: Example) -> Example:
        """A training conversation as this family learns it."""
        del rng
        return example

    @abstractmethod
    def in_mode(self, example: Example, mode: str) -> Example:
        """A held-out item, asked in one of `modes`."""

    def encoder(self) -> Encoder:
        """A fresh encoder with its own cache."""
        return Encoder(self, Tokenizer.from_file(str(self.folder / "tokenizer.json")))

    def plain_text(self, example: Example) -> str:
        """The whole conversation without what is written letter by letter, for training the tokenizer."""
        return re.sub(f"{SPELL_OPEN}[^{SPELL_CLOSE}]*{SPELL_CLOSE}", "", "".join(self.prompt_and_target(example)))


class Encoder:
    """Token ids of rendered text. Special tokens end a piece, so pieces are encoded alone and repeated ones kept."""

    def __init__(self, dialect: Dialect, tokenizer: Tokenizer) -> None:
        self.dialect = dialect
        self._tokenizer = tokenizer
        self._special = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
        self._cut = re.compile("(" + "|".join(map(re.escape, self._special)) + ")")
        self._kept: dict[str, list[int]] = {}

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def text(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._cut.split(text):
            if piece in self._special:
                ids.append(self._special[piece])
            elif piece:
                ids += self._piece(piece)
        return ids

    def num_tokens(self, text: str) -> int:
        return len(self.text(text))

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
        """Token ids of the whole conversation and how many of them are not trained: the prompt and what is forced."""
        prompt, target = self.dialect.prompt_and_target(example)
        given = self.text(prompt)
        num_given = len(given)
        if example.forced:
            thought = target.rpartition(str(example.messages[-1]["content"]))[0]
            num_given += len(self.target(thought + example.forced))
        return given + self.target(target), num_given
