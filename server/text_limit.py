"""`TextLimit`: refuses a text that cannot fit the context, without tokenizing it."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from server.errors import ContextTooLong

NO_LETTERS: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TextLimit:
    """A text of more than `max_token_bytes` bytes a token does not fit `num_contexts` contexts of `max_model_len`."""

    max_model_len: int
    max_token_bytes: int
    num_contexts: int = 1

    def check(self, text: str, letters: Mapping[int, int] = NO_LETTERS) -> None:
        """Raise ContextTooLong for a text that cannot fit; `letters` maps placeholders to the letters to put back."""
        max_tokens = self.num_contexts * self.max_model_len
        if len(text) * 4 <= max_tokens * self.max_token_bytes:  # a character has at most four bytes
            return
        text = text.translate(letters)
        num_bytes = len(text) if text.isascii() else len(text.encode(errors="replace"))
        if num_bytes > max_tokens * self.max_token_bytes:
            times = "" if self.num_contexts == 1 else f"{self.num_contexts} times "
            raise ContextTooLong(
                f"the prompt has {num_bytes} bytes and therefore more than {max_tokens} tokens, {times}this model's "
                "maximum context length: shorten the messages or the prompt"
            )


NO_LIMIT = TextLimit(sys.maxsize, 1)
"""Any text fits."""
