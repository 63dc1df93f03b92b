"""Parsers of model output and grammars for it, one of each per syntax: Harmony (GPT-OSS), DeepSeek, plain text.

The tokenizer decides which.
"""

from collections.abc import Sequence
from typing import Protocol

from engine.grammar_spec import Format
from server.parsers import deepseek, harmony
from server.parsers.base import Event, Kind, Parser, ParserFactory, TokenBytes
from server.parsers.deepseek import DeepSeekParser
from server.parsers.deepseek_grammar import DeepSeekGrammar
from server.parsers.harmony import HarmonyParser
from server.parsers.harmony_grammar import HarmonyGrammar
from server.parsers.plain import PlainParser
from server.parsers.plain_grammar import PlainGrammar
from server.structured.turn import TurnRules

__all__ = [
    "DeepSeekParser",
    "Event",
    "HarmonyParser",
    "Kind",
    "Parser",
    "ParserFactory",
    "PlainParser",
    "TokenBytes",
    "TurnGrammar",
    "choose_grammar",
    "choose_parser",
    "end_of_turn_ids",
    "needed_markers",
]

_ENDS_OF_TURN = (*harmony.END_OF_TURN, *deepseek.END_OF_TURN)


class TurnGrammar(Protocol):
    """Writes rules for a turn in the syntax that the model's parser reads."""

    def supports_calls(self) -> bool:
        """Whether the syntax has calls."""

    def turn(self, rules: TurnRules, prompt_ids: Sequence[int]) -> Format | None:
        """The format of all tokens after the prompt; None if the prompt ends where rules cannot begin."""


def choose_grammar(tokenizer: TokenBytes, chat_template: str | None) -> TurnGrammar:
    """The grammar in the syntax of `choose_parser`."""
    if tokenizer.special_tokens.keys() >= harmony.REQUIRED:
        return HarmonyGrammar(tokenizer)
    if tokenizer.special_tokens.keys() >= deepseek.REQUIRED:
        return DeepSeekGrammar(tokenizer, chat_template)
    return PlainGrammar(tokenizer)


def choose_parser(tokenizer: TokenBytes) -> ParserFactory:
    """The parser whose markers are among the tokenizer's control tokens; plain text if no syntax is known."""

    def make(prompt_ids: Sequence[int], tool_names: frozenset[str]) -> Parser:
        if tokenizer.special_tokens.keys() >= harmony.REQUIRED:
            return HarmonyParser(tokenizer, prompt_ids, tool_names)
        if tokenizer.special_tokens.keys() >= deepseek.REQUIRED:
            return DeepSeekParser(tokenizer, prompt_ids, tool_names)
        return PlainParser(tokenizer)

    return make


def end_of_turn_ids(tokenizer: TokenBytes) -> tuple[int, ...]:
    """Control tokens after which the parser reads nothing more, so that the engine can stop there too."""
    known = tokenizer.special_tokens
    return tuple(known[name] for name in _ENDS_OF_TURN if name in known)


def needed_markers(tokenizer: TokenBytes) -> frozenset[str]:
    """The markers that the chosen parser reads and those of `end_of_turn_ids`; a tokenizer may lack some."""
    for syntax in (harmony, deepseek):
        if tokenizer.special_tokens.keys() >= syntax.REQUIRED:
            return frozenset((*syntax.REQUIRED, *_ENDS_OF_TURN))
    return frozenset(_ENDS_OF_TURN)
