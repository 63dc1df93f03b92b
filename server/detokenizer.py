"""`TextStream`: turns the bytes of tokens into whole characters and remembers which token each one came from.

Each token is decoded once, so a long answer costs no more per token than a short one.
"""

import codecs
from collections import deque
from dataclasses import dataclass, replace


@dataclass(slots=True)
class TextToken:
    """One token and its share of a text.

    `data` are its exact bytes, `text` the characters it completed (a character of several tokens belongs to the last).
    """

    position: int  # index among the generated tokens
    data: bytes
    text: str
    start: int  # characters of the stream before `text`
    num_needed: int  # the token is visible once this many characters of the stream are
    num_carried: int  # bytes of its first character that came with earlier tokens


class TextStream:
    """Decodes UTF-8 incrementally; invalid bytes become U+FFFD.

    `feed` returns the characters that are complete. `take(num_chars)` returns, once each and in order, the tokens that
    lie within the first `num_chars` characters.
    """

    def __init__(self) -> None:
        self._undecoded = b""  # the beginning of a character
        self._num_chars = 0
        self._waiting: deque[TextToken] = deque()

    @property
    def is_whole(self) -> bool:
        """Whether the text so far ends with a whole character."""
        return not self._undecoded

    def feed(self, data: bytes, position: int = -1) -> str:
        """Add one token's bytes; a negative position says that they come from no token."""
        if position < 0 and not self._undecoded and data.isascii():  # nearly always
            self._num_chars += len(data)
            return data.decode("ascii")
        num_carried = len(self._undecoded)
        waiting = self._undecoded + data if num_carried else data
        text, num_decoded = codecs.utf_8_decode(waiting, "replace", False)
        self._undecoded = waiting[num_decoded:]
        start = self._num_chars
        self._num_chars += len(text)
        if position >= 0:
            num_needed = self._num_chars + bool(self._undecoded)
            self._waiting.append(TextToken(position, data, text, start, num_needed, num_carried))
        return text

    def flush(self) -> str:
        """End the stream: bytes that never became a character turn into U+FFFD."""
        text = self._undecoded.decode(errors="replace")
        self._undecoded = b""
        self._num_chars += len(text)
        if text and self._waiting:
            self._waiting[-1].text += text
        return text

    def take(self, num_chars: int) -> list[TextToken]:
        """Tokens that are wholly visible once the first `num_chars` characters are."""
        taken: list[TextToken] = []
        while self._waiting and self._waiting[0].num_needed <= num_chars:
            taken.append(self._waiting.popleft())
        return taken

    def cut(self, num_chars: int) -> list[TextToken]:
        """Like `take` for a text that ends at `num_chars`: a token that reaches beyond the end is shortened."""
        taken = self.take(num_chars)
        if self._waiting:
            token = self._waiting[0]
            if num_chars > token.start:
                text = token.text[: num_chars - token.start]
                data = token.data[: len(text.encode()) - token.num_carried]
                taken.append(replace(token, data=data, text=text))
        self._waiting.clear()
        return taken
