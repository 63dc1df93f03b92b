"""How each syntax marks reasoning, so that the engine can end it once its budget is used."""

from collections.abc import Sequence
from typing import Protocol

from engine.types import ThinkingBudget
from loaders.markers import DeepSeek, Harmony
from server.parsers import deepseek, harmony


class ThinkingTokenizer(Protocol):
    """The part of a tokenizer that this needs."""

    special_tokens: dict[str, int]

    def encode(self, text: str, *, allow_special: bool = True) -> list[int]:
        """Ids of a text."""


def thinking_budget(tokenizer: ThinkingTokenizer, prompt_ids: Sequence[int], num_tokens: int) -> ThinkingBudget | None:
    """The budget of an answer to this prompt; None if the tokenizer knows no marks of reasoning."""
    known = tokenizer.special_tokens
    ends: tuple[str, ...]
    if known.keys() >= harmony.REQUIRED:
        analysis = tokenizer.encode("analysis", allow_special=False)
        assistant = tokenizer.encode("assistant", allow_special=False)
        begin = (known[Harmony.CHANNEL], *analysis, known[Harmony.MESSAGE])
        ends = (Harmony.END, Harmony.START, Harmony.CHANNEL, *harmony.END_OF_TURN)
        # Another message begins, and its channel is not analysis: the final answer, or a call.
        close, barred = (known[Harmony.END], known[Harmony.START], *assistant, known[Harmony.CHANNEL]), analysis[0]
    elif known.keys() >= deepseek.REQUIRED:
        begin, close, barred = (known[DeepSeek.THINK],), (known[DeepSeek.THINK_END],), None
        ends = (DeepSeek.THINK_END, DeepSeek.CALLS_BEGIN, *deepseek.END_OF_TURN)
    else:
        return None
    return ThinkingBudget(
        num_tokens=num_tokens,
        begin_ids=begin,
        end_ids=tuple(known[name] for name in ends if name in known),
        close_ids=close,
        barred_id=barred,
        begins_inside=_ends_inside(prompt_ids, begin, frozenset(known.values())),
    )


def _ends_inside(prompt_ids: Sequence[int], begin: tuple[int, ...], control_ids: frozenset[int]) -> bool:
    """Whether nothing but text follows the last `begin` of the prompt."""
    last = next((index for index in range(len(prompt_ids) - 1, -1, -1) if prompt_ids[index] in control_ids), -1)
    return tuple(prompt_ids[max(0, last + 1 - len(begin)) : last + 1]) == begin
