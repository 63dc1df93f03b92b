"""DeepSeek-V3.1's text: `thinking` on or off, reasoning up to `</think>`, calls between markers."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.tiny_models.data.chat_lines import SIZE
from tools.tiny_models.data.example import Example, Message
from tools.tiny_models.dialect import Dialect

FILES = Path(__file__).parent / "files"
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
CONTROL = (
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
)  # fmt: skip
THINK = ("<think>", "</think>")
CALL = re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
# Without thinking, the steps of these stand in the answer: few digits fit into one guess.
SHOWS_WORK = {"addition", "subtraction", "multiplication", "division", "units"}
OWN_SIZE = "I am tiny: 5 layers, 4 of them with 8 experts, 3 of which are active per token, about 6 million parameters."
DIRECT_SHARE = 0.35  # of the training conversations: without thinking
DIRECT_SORTING_SHARE = 0.6  # of those that sort: without thinking that takes longest to learn


class DeepseekDialect(Dialect):
    """The template never writes reasoning; the target has it, up to `</think>`, where thinking is on."""

    stop = (EOS,)
    modes = ("thinking", "direct")
    bos_token = BOS

    def variables(self, example: Example) -> dict[str, Any]:
        return {"tools": example.tools, "thinking": thinks(example)}

    def prompt_and_target(self, example: Example) -> tuple[str, str]:
        message = example.messages[-1]
        is_continued = example.messages[-2]["role"] == "tool"  # the template opens no new turn after a result
        thought = message.get("reasoning") or ""
        opening = f"{thought}</think>" if thinks(example) and not is_continued else ""
        return self.prompt(example), opening + message["content"] + calls_text(message) + EOS

    def read(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        if not text.endswith(EOS):
            return "", []
        content = text.removesuffix(EOS).rpartition("</think>")[2]
        return content.partition("<｜tool▁calls▁begin｜>")[0], CALL.findall(content)

    def adapted(self, rng: random.Random, example: Example) -> Example:
        messages = [m | {"content": OWN_SIZE} if m["content"] == SIZE else m for m in example.messages]
        share = DIRECT_SORTING_SHARE if example.category == "sorting" else DIRECT_SHARE
        mode = "direct" if rng.random() < share else "thinking"
        return self.in_mode(replace(example, messages=messages), mode)

    def in_mode(self, example: Example, mode: str) -> Example:
        if mode == "thinking":
            return replace(example, effort="medium")
        last = dict(example.messages[-1])
        thought = last.pop("reasoning", "")
        if example.category in SHOWS_WORK:
            last["content"] = f"{thought}\n{last['content']}"
        return replace(example, messages=[*example.messages[:-1], last], effort="low")


def thinks(example: Example) -> bool:
    return example.effort != "low"


def calls_text(message: Message) -> str:
    """The calls of an assistant message as the template writes them; their arguments are JSON text."""
    calls = message.get("tool_calls") or []
    if not calls:
        return ""
    functions = [call["function"] for call in calls]
    texts = [f"<｜tool▁call▁begin｜>{f['name']}<｜tool▁sep｜>{f['arguments']}<｜tool▁call▁end｜>" for f in functions]
    return "<｜tool▁calls▁begin｜>" + "".join(texts) + "<｜tool▁calls▁end｜>"


DIALECT = DeepseekDialect(FILES)
