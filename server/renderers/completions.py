"""`CompletionRenderer`: makes the texts and log-probability lists of /v1/completions out of pieces."""

from collections.abc import Iterable, Sequence
from typing import Any

from typing_extensions import override

from engine.types import TokenLogprobs
from server.choice import Piece
from server.convert import PreparedRequest
from server.detokenizer import TextStream, TextToken
from server.parsers import TokenBytes
from server.renderers.chunks import ChunkRenderer
from server.schema.completions import CompletionLogprobs, CompletionRequest, PromptLogprob

_LogprobToken = tuple[TextToken, TokenLogprobs | None]


def _no_logprobs() -> CompletionLogprobs:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


class CompletionRenderer(ChunkRenderer):
    """Log-probabilities have one entry a token, for the prompt too if it is echoed; joined `tokens` are the text."""

    body_object = "text_completion"
    chunk_object = "text_completion"
    prompt_ids_are_in_choices = True

    def __init__(
        self, prepared: PreparedRequest, tokenizer: TokenBytes, wire: CompletionRequest, *, model: str, request_id: str
    ) -> None:
        super().__init__(prepared, wire, model=model, request_id=request_id)
        self._tokenizer = tokenizer
        self._logprobs = wire.logprobs
        self._prompt_logprobs = wire.prompt_logprobs
        self._echo = bool(wire.echo)
        self._prompts = wire.prompt
        self._num_chars = [0] * len(self.choices)  # of all text shown so far, the offset of the next token

    @override
    def first_entries(self, index: int) -> list[dict[str, Any]]:
        return [self._entry(index, *self._echoed(index))] if self._echo else []

    @override
    def entry(self, index: int, piece: Piece) -> dict[str, Any]:
        return self._entry(index, piece.text, self._entries(index, self._generated(index, piece.tokens)))

    @override
    def last_entry(self, index: int) -> dict[str, Any]:
        return self._entry(index, "", None)

    @override
    def folded_entry(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        logprobs = _no_logprobs()
        for entry in entries:
            _extend(logprobs, entry["logprobs"] or _no_logprobs())
        index = entries[0]["index"]
        folded = self._entry(index, "".join(entry["text"] for entry in entries), logprobs)
        if self._prompt_logprobs is not None:
            folded["prompt_logprobs"] = [self._scored(each) for each in self.choices[index].prompt_logprobs or ()]
        return folded

    def _entry(self, index: int, text: str, logprobs: CompletionLogprobs | None) -> dict[str, Any]:
        shown = None if self._logprobs is None else logprobs
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": None}

    def _generated(self, index: int, tokens: Sequence[TextToken]) -> Iterable[_LogprobToken]:
        return ((token, self.choices[index].logprobs_at(token.position)) for token in tokens)

    def _echoed(self, index: int) -> tuple[str, CompletionLogprobs]:
        """The prompt's text with, if asked for, an entry for each of its tokens.

        A token that the tokenizer put before the client's text (BOS) keeps its entry and is an empty text.
        """
        prompt_ids = self.prepared.requests[index].prompt_ids
        stream = TextStream()
        for position, token_id in enumerate(prompt_ids):
            stream.feed(self._tokenizer.token_bytes(token_id), position)
        stream.flush()
        tokens = stream.cut(sum(len(self._tokenizer.token_bytes(token_id)) for token_id in prompt_ids))
        text = "".join(token.text for token in tokens)
        prompt = self._prompts[index // self.prepared.num_choices]
        if isinstance(prompt, str) and text == tokens[0].text + prompt:
            tokens[0].text, text = "", prompt
        known = self.choices[index].prompt_logprobs or [None] * len(tokens)
        shown = [each and TokenLogprobs(each.token_id, each.logprob, each.top[: self._logprobs]) for each in known]
        return text, self._entries(index, zip(tokens, shown, strict=True))

    def _scored(self, logprobs: TokenLogprobs | None) -> dict[str, PromptLogprob] | None:
        """A token of the prompt and the best ones in its place, by id."""
        if logprobs is None:
            return None
        best = enumerate(logprobs.top[: self._prompt_logprobs], 1)
        known: dict[int, tuple[float, int | None]] = {token_id: (value, rank) for rank, (token_id, value) in best}
        known.setdefault(logprobs.token_id, (logprobs.logprob, None))
        return {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": self._name(token_id)}
            for token_id, (logprob, rank) in known.items()
        }

    def _entries(self, index: int, tokens: Iterable[_LogprobToken]) -> CompletionLogprobs:
        entries = _no_logprobs()
        if self._logprobs is None:
            return entries
        for token, logprobs in tokens:
            entries["tokens"].append(token.text)
            entries["token_logprobs"].append(None if logprobs is None else logprobs.logprob)
            entries["top_logprobs"].append(None if logprobs is None else self._top(logprobs))
            entries["text_offset"].append(self._num_chars[index])
            self._num_chars[index] += len(token.text)
        return entries

    def _top(self, logprobs: TokenLogprobs) -> dict[str, float]:
        """The best tokens, and the chosen one even if it is not among them."""
        top = {self._name(token_id): logprob for token_id, logprob in logprobs.top}
        return {**top, self._name(logprobs.token_id): logprobs.logprob}

    def _name(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _extend(logprobs: CompletionLogprobs, more: CompletionLogprobs) -> None:
    logprobs["tokens"] += more["tokens"]
    logprobs["token_logprobs"] += more["token_logprobs"]
    logprobs["top_logprobs"] += more["top_logprobs"]
    logprobs["text_offset"] += more["text_offset"]
