"""`TextLimit`: refuses a text that cannot fit the context, without tokenizing it."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from server.errors import ContextTooLong

NO_LETTERS: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TextLimit:
    """A text of more bytes than `max_tokens * max_token_bytes` has more than `max_tokens` tokens."""

    max_tokens: int
    max_token_bytes: int

    def check(self, text: str, letters: Mapping[int, int] = NO_LETTERS) -> None:
        """Raise ContextTooLong for a text that cannot fit; `letters` maps placeholders to the letters to put back."""
        if len(text) * 4 <= self.max_tokens * self.max_token_bytes:  # a character has at most four bytes
            return
        text = text.translate(letters)
        num_bytes = len(text) if text.isascii() else len(text.encode(errors="replace"))
        if num_bytes > self.max_tokens * self.max_token_bytes:
            raise ContextTooLong(
                f"the prompt has {num_bytes} bytes and therefore more than {self.max_tokens} tokens, this model's "
                "maximum context length: shorten the messages or the prompt"
            )


NO_LIMIT = TextLimit(sys.maxsize, 1)
"""Any text fits."""
