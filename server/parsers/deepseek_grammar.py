"""Rules for a turn of DeepSeek models: thinking, then an answer, or calls as the model's chat template spells them."""

from collections.abc import Mapping, Sequence

from engine.grammar_spec import Format, free_tokens, one_of, regex, repeated, sequence, text, token
from loaders.markers import DeepSeek
from server.parsers.base import TokenBytes, is_blank
from server.structured.turn import CallRule, TurnRules

_CALL = (DeepSeek.CALL_BEGIN, DeepSeek.CALL_SEP, DeepSeek.CALL_END)


class DeepSeekGrammar:
    """Writes the rules for the part of a turn that follows a prompt."""

    def __init__(self, tokenizer: TokenBytes, chat_template: str | None) -> None:
        self._ids: Mapping[str, int] = tokenizer.special_tokens
        self._token_bytes = tokenizer.token_bytes
        self._names = {token_id: name for name, token_id in self._ids.items()}
        self._has_blocks = "```json" in (chat_template or "")  # V3 and R1; later models write the arguments alone

    def supports_calls(self) -> bool:
        """If the tokenizer has the markers of calls; distilled models have only those of thinking."""
        return self._ids.keys() >= {DeepSeek.CALLS_BEGIN, DeepSeek.CALLS_END, *_CALL}

    def turn(self, rules: TurnRules, prompt_ids: Sequence[int]) -> Format | None:
        """The format of the rest of the turn."""
        end = self._end(rules)
        marker, has_text = self._last_marker(prompt_ids)
        # Line breaks only behind a `</think>` that the model writes: nowhere else does the parser drop them.
        thinking = sequence(self._free(), token(self._ids[DeepSeek.THINK_END]), _line_breaks())
        if marker == DeepSeek.THINK and not has_text:
            return sequence(thinking, end)
        if marker == DeepSeek.THINK_END or (marker == DeepSeek.ASSISTANT and has_text):  # no thinking inside an answer
            return end
        return sequence(repeated(sequence(token(self._ids[DeepSeek.THINK]), thinking), 0, 1), end)

    def _end(self, rules: TurnRules) -> Format:
        """The answer or the calls. Forced calls come at once: a model that would rather answer would never call."""
        ends = [] if rules.must_call else [self._free() if rules.answer is None else rules.answer]
        if rules.calls:
            before = [self._free()] if rules.answer is None and not rules.must_call else []
            ends.append(sequence(*before, self._calls(rules)))
        return one_of(*ends)

    def _last_marker(self, prompt_ids: Sequence[int]) -> tuple[str, bool]:
        """The last control token of the prompt, and whether text follows it that is not blank."""
        has_text = False
        for token_id in reversed(prompt_ids):
            if token_id in self._names:
                return self._names[token_id], has_text
            has_text = has_text or not is_blank(self._token_bytes(token_id))
        return "", has_text

    def _free(self) -> Format:
        return free_tokens(self._ids.values())

    def _calls(self, rules: TurnRules) -> Format:
        call = one_of(*map(self._call, rules.calls))
        more = [repeated(sequence(_line_breaks(), call), 0, None)] if rules.is_parallel else []
        return sequence(token(self._ids[DeepSeek.CALLS_BEGIN]), call, *more, token(self._ids[DeepSeek.CALLS_END]))

    def _call(self, call: CallRule) -> Format:
        begin, separator, end = (token(self._ids[name]) for name in _CALL)
        if self._has_blocks:
            opened, closed = text(f"{call.name}\n```json\n"), text("\n```")
            return sequence(begin, text("function"), separator, opened, call.arguments, closed, end)
        return sequence(begin, text(call.name), separator, call.arguments, end)


def _line_breaks() -> Format:
    return regex(r"\n{0,2}")
