"""Harmony: GPT-OSS's channels, with the reasoning effort as a line of the system message."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.tiny_models.data.example import Example, Message
from tools.tiny_models.dialect import Dialect

ASSETS = Path(__file__).resolve().parents[4] / "assets" / "tiny-gpt-oss"
GENERATION_PROMPT = "<|start|>assistant"
CALL = re.compile(r"commentary to=functions\.(\S+) <\|constrain\|>json<\|message\|>(.*?)<\|call\|>", re.DOTALL)
FINAL = re.compile(r"<\|channel\|>final<\|message\|>(.*?)<\|return\|>", re.DOTALL)


class HarmonyDialect(Dialect):
    """The template of the bundled folder; one rendering gives prompt and target."""

    stop = ("<|return|>", "<|call|>", "<|endoftext|>")
    modes = ("medium",)

    def variables(self, example: Example) -> dict[str, Any]:
        return {"tools": example.tools, "reasoning_effort": example.effort}

    def prompt_and_target(self, example: Example) -> tuple[str, str]:
        full = self.render(example.messages, **self.variables(example))
        cut = len(full)
        for _ in range(starts_in(example.messages[-1])):
            cut = full.rindex(GENERATION_PROMPT, 0, cut)
        cut += len(GENERATION_PROMPT)
        return full[:cut], full[cut:]

    def read(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        final = FINAL.search(text)
        return (final.group(1) if final else ""), CALL.findall(text)

    def in_mode(self, example: Example, mode: str) -> Example:
        return replace(example, effort=mode)


def starts_in(message: Message) -> int:
    """How many Harmony messages the template makes of one assistant message."""
    thought = any(message.get(key) for key in ("reasoning", "reasoning_content", "thinking"))
    calls = len(message.get("tool_calls") or [])
    return int(thought) + calls + int(not calls or bool(message.get("content")))


DIALECT = HarmonyDialect(ASSETS)
