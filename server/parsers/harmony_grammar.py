"""Rules for a turn in Harmony (GPT-OSS): headers, channels and recipients as the model writes them.

Any number of analysis messages comes first. Then one message ends the turn: an answer on the final channel, or a call
on the commentary channel. Preambles (commentary for the user) may come before it if the answer may be any text.
Where a call is forced, two messages at most come first: a model that would rather answer would repeat its analysis.
"""

from collections.abc import Mapping, Sequence

from engine.grammar_spec import Format, free_tokens, one_of, repeated, sequence, text, token
from loaders.markers import Harmony
from server.parsers.base import TokenBytes
from server.structured.turn import CallRule, TurnRules

_MOST_BEFORE_FORCED_CALL = 2


class HarmonyGrammar:
    """Writes the rules for the part of a turn that follows a prompt."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        self._ids: Mapping[str, int] = tokenizer.special_tokens
        self._token_bytes = tokenizer.token_bytes
        self._names = {token_id: name for name, token_id in self._ids.items()}

    def supports_calls(self) -> bool:
        """Always: recipients are text."""
        return True

    def turn(self, rules: TurnRules, prompt_ids: Sequence[int]) -> Format | None:
        """The format of the rest of the turn, or of the answer that the prompt begins; None if neither can come."""
        opened = self._opened(prompt_ids)
        begins = [self._message("analysis")]
        if rules.answer is None:
            begins.append(self._message("commentary"))
        ends = [] if rules.must_call else [self._final(rules)]
        ends += [self._call(call) for call in rules.calls]
        most = _MOST_BEFORE_FORCED_CALL if rules.must_call else None
        whole = sequence(repeated(one_of(*begins), 0, most), one_of(*ends))
        if opened == "assistant":
            return whole
        if opened == "assistant<|channel|>analysis<|message|>":
            return sequence(self._rest_of_message(), whole)
        if opened.startswith("assistant<|channel|>final<|message|>") and not rules.must_call:
            return self._body(rules)
        return None

    def _opened(self, prompt_ids: Sequence[int]) -> str:
        """What the prompt holds of the message that the model continues."""
        start = self._ids[Harmony.START]
        first = next((i for i in range(len(prompt_ids) - 1, -1, -1) if prompt_ids[i] == start), len(prompt_ids))
        parts = (self._names.get(i, "").encode() or self._token_bytes(i) for i in prompt_ids[first + 1 :])
        return b"".join(parts).decode(errors="replace")

    def _token(self, name: str) -> Format:
        return token(self._ids[name])

    def _free(self) -> Format:
        return free_tokens(self._ids.values())

    def _message(self, channel: str) -> Format:
        """A message with any text, and the beginning of the next."""
        return sequence(
            self._token(Harmony.CHANNEL), text(channel), self._token(Harmony.MESSAGE), self._rest_of_message()
        )

    def _rest_of_message(self) -> Format:
        return sequence(self._free(), self._token(Harmony.END), self._token(Harmony.START), text("assistant"))

    def _final(self, rules: TurnRules) -> Format:
        header = sequence(self._token(Harmony.CHANNEL), text("final"))
        return sequence(header, self._token(Harmony.MESSAGE), self._body(rules))

    def _body(self, rules: TurnRules) -> Format:
        body = self._free() if rules.answer is None else rules.answer
        return sequence(body, *self._end(Harmony.RETURN))

    def _call(self, call: CallRule) -> Format:
        """The recipient stands in the channel's section, or, as OpenAI's renderer writes it, in the role's."""
        recipient = f" to=functions.{call.name}"
        in_channel = sequence(self._token(Harmony.CHANNEL), text(f"commentary{recipient}"))
        in_role = sequence(text(recipient), self._token(Harmony.CHANNEL), text("commentary"))
        body = (self._token(Harmony.MESSAGE), call.arguments, *self._end(Harmony.CALL))
        return sequence(one_of(in_channel, in_role), self._content_type(), *body)

    def _content_type(self) -> Format:
        """Nothing, ` json`, or `<|constrain|>json` with a space before it or not."""
        options = [text(" json")]
        if Harmony.CONSTRAIN in self._ids:
            marked = sequence(self._token(Harmony.CONSTRAIN), text("json"))
            options += [marked, sequence(text(" "), marked)]
        return repeated(one_of(*options), 0, 1)

    def _end(self, name: str) -> list[Format]:
        return [self._token(name)] if name in self._ids else []
