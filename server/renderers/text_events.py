"""`TextEvents`: events of the tokens that only add text to a part of an answer, made without looking at the answer."""

from collections.abc import Sequence

from engine.types import EngineOutput
from server.token_texts import TokenTexts


class TextEvents:
    """Belongs to one streamed choice. `Renderer.stream` opens it after an output, for as long as such tokens follow.

    A step of many streams finds little of them in the processor's caches, so what a token needs stands close together.
    """

    __slots__ = ("_around", "_num_cached_tokens", "_texts", "_token_ids")

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._token_ids: list[int] = []
        self._around: tuple[bytes, ...] | None = None
        self._num_cached_tokens = 0

    def open(self, around: Sequence[bytes], token_ids: list[int], num_cached_tokens: int) -> None:
        """From now on a text stands between these parts in its event; ids of tokens taken are added to the list."""
        self._around, self._token_ids, self._num_cached_tokens = tuple(around), token_ids, num_cached_tokens

    def close(self) -> None:
        """Take nothing until `open` is called."""
        self._around = None

    def take(self, output: EngineOutput) -> bytes | None:
        """The event of an output that is a token of whole characters.

        None if the output may bring anything else; then it has not been taken in.
        """
        if len(output.token_ids) != 1 or output.finish_reason is not None:
            return None
        if output.num_cached_tokens > self._num_cached_tokens or output.prompt_logprobs is not None:
            return None
        return self.take_token(output.token_ids[0])

    def take_token(self, token_id: int) -> bytes | None:
        """The same, for an output that is one more token and nothing else."""
        around = self._around
        text = self._texts[token_id]
        if around is None or text is None:
            return None
        self._token_ids.append(token_id)
        return text.join(around)
