"""`PlainParser`: every token is content. For raw completions, and for models without a known output syntax."""

from server.parsers.base import Event, Kind, TokenBytes


class PlainParser:
    """Control tokens become empty events, or their own text with `show_special`."""

    num_undeclared_calls = 0

    def __init__(self, tokenizer: TokenBytes, *, show_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._hidden = frozenset() if show_special else frozenset(tokenizer.special_tokens.values())
        self._position = -1

    def feed(self, token_id: int) -> list[Event]:
        """One event a token."""
        self._position += 1
        data = b"" if token_id in self._hidden else self._tokenizer.token_bytes(token_id)
        return [Event(Kind.CONTENT, data, self._position)]

    @property
    def text_kind(self) -> Kind:
        """Always content."""
        return Kind.CONTENT

    def finish(self) -> list[Event]:
        """Nothing is ever held back."""
        return []
