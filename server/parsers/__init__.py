"""Parsers of model output, one per syntax: Harmony (GPT-OSS), DeepSeek, plain text. The tokenizer decides which."""

from collections.abc import Sequence

from server.parsers import deepseek, harmony
from server.parsers.base import Event, Kind, Parser, ParserFactory, TokenBytes
from server.parsers.deepseek import DeepSeekParser
from server.parsers.harmony import HarmonyParser
from server.parsers.plain import PlainParser

__all__ = [
    "DeepSeekParser",
    "Event",
    "HarmonyParser",
    "Kind",
    "Parser",
    "ParserFactory",
    "PlainParser",
    "TokenBytes",
    "choose_parser",
    "end_of_turn_ids",
]


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
    return tuple(known[name] for name in (*harmony.END_OF_TURN, *deepseek.END_OF_TURN) if name in known)
