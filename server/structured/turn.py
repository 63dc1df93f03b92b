"""`TurnRules`: what one turn of the assistant may consist of. A dialect (`server.parsers`) writes it in its syntax."""

from dataclasses import dataclass
from typing import NamedTuple

from engine.grammar_spec import Format

MAX_WHITESPACE = 8
"""Characters of white space in a row between parts of JSON. Without a bound a model may write white space for ever."""


class CallRule(NamedTuple):
    """A function that may be called, and the format of its arguments."""

    name: str
    arguments: Format


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRules:
    """A turn ends with an answer for the user or with calls. Reasoning before either is free."""

    answer: Format | None = None
    """The format of the answer; None for any text."""

    calls: tuple[CallRule, ...] = ()
    must_call: bool = False
    is_parallel: bool = True
    """Several calls may follow one another, if the dialect can say so."""

    param: str
    """Request field that asks for these rules."""
