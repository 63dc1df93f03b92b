"""`ChatAnswer`: makes the messages, chunks and log-probabilities of /v1/chat/completions out of pieces."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from server.answer import Answer
from server.choice import Piece
from server.convert import PreparedRequest
from server.detokenizer import TextToken
from server.parsers import Kind, TokenBytes
from server.schema.chat import AnswerMessage, ChatLogprobs, TokenLogprob, ToolCallAnswer, TopLogprob


@dataclass(slots=True)
class _Gathered:
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallAnswer] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class ChatAnswer(Answer):
    """Content that never came is null; reasoning is given under both of its common names."""

    body_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, prepared: PreparedRequest, tokenizer: TokenBytes, *, model: str, request_id: str, logprobs: bool
    ) -> None:
        super().__init__(prepared, model=model, request_id=request_id)
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._gathered = [_Gathered() for _ in self.choices]

    @override
    def add(self, index: int, piece: Piece) -> None:
        gathered = self._gathered[index]
        if piece.kind is Kind.CONTENT:
            gathered.content.append(piece.text)
            gathered.logprobs += self._entries(index, piece.tokens)
        elif piece.kind is Kind.REASONING:
            gathered.reasoning.append(piece.text)
        elif piece.name is not None:
            gathered.calls.append(_opened_call(piece.name))
        else:
            gathered.calls[piece.call]["function"]["arguments"] += piece.text

    @override
    def add_first(self, index: int) -> None:
        pass  # nothing comes before the first piece of a message

    @override
    def first_parts(self, index: int) -> list[dict[str, Any]]:
        return [self._chunk(index, {"role": "assistant", "content": ""})]

    @override
    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        if piece.kind is Kind.CONTENT:
            return self._chunk(index, {"content": piece.text}, self._entries(index, piece.tokens))
        if piece.kind is Kind.REASONING:
            return self._chunk(index, {"reasoning": piece.text, "reasoning_content": piece.text})
        if piece.name is not None:
            return self._chunk(index, {"tool_calls": [{"index": piece.call, **_opened_call(piece.name)}]})
        return self._chunk(index, {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]})

    @override
    def last_part(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {})

    @override
    def body_part(self, index: int) -> dict[str, Any]:
        gathered = self._gathered[index]
        reasoning = "".join(gathered.reasoning) or None
        message: AnswerMessage = {
            "role": "assistant",
            "content": "".join(gathered.content) or None,
            "reasoning": reasoning,
            "reasoning_content": reasoning,
            "refusal": None,
        }
        if gathered.calls:
            message["tool_calls"] = gathered.calls
        return {"index": index, "message": message, "logprobs": self._wrapped(gathered.logprobs)}

    def _chunk(self, index: int, delta: AnswerMessage, entries: list[TokenLogprob] | None = None) -> dict[str, Any]:
        logprobs = self._wrapped(entries) if entries else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _wrapped(self, entries: list[TokenLogprob]) -> ChatLogprobs | None:
        return {"content": entries} if self._logprobs else None

    def _entries(self, index: int, tokens: Sequence[TextToken]) -> list[TokenLogprob]:
        """One entry for every token with visible bytes."""
        entries: list[TokenLogprob] = []
        for token in tokens if self._logprobs else ():
            logprobs = self.choices[index].logprobs_at(token.position)
            if logprobs is not None and token.data:
                top = [self._alternative(token_id, logprob) for token_id, logprob in logprobs.top]
                entries.append({**_named(token.data, logprobs.logprob), "top_logprobs": top})
        return entries

    def _alternative(self, token_id: int, logprob: float) -> TopLogprob:
        return _named(self._tokenizer.token_bytes(token_id), logprob)


def _named(data: bytes, logprob: float) -> TopLogprob:
    return {"token": data.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(data)}


def _opened_call(name: str) -> ToolCallAnswer:
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": ""}}
