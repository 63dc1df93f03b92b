"""Rules for a turn of models without a known syntax: the answer is all there is."""

from collections.abc import Sequence

from engine.grammar_spec import Format, free_tokens
from server.parsers.base import TokenBytes
from server.structured.turn import TurnRules


class PlainGrammar:
    """Writes the rules for the part of a turn that follows a prompt."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        self._control_ids = tuple(tokenizer.special_tokens.values())

    def supports_calls(self) -> bool:
        """Never."""
        return False

    def turn(self, rules: TurnRules, prompt_ids: Sequence[int]) -> Format | None:
        """The format of the answer."""
        return free_tokens(self._control_ids) if rules.answer is None else rules.answer
