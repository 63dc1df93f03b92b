"""`ChatRenderer`: makes the messages, chunks and log-probabilities of /v1/chat/completions out of pieces."""

import uuid
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from server.choice import Choice, Piece
from server.convert import PreparedRequest
from server.detokenizer import TextToken
from server.parsers import Kind, TokenBytes
from server.renderers.chunks import ChunkRenderer
from server.schema.chat import (
    AnswerMessage,
    ChatCompletionRequest,
    ChatLogprobs,
    TokenLogprob,
    ToolCallAnswer,
    TopLogprob,
)


class ChatRenderer(ChunkRenderer):
    """Content that never came is null; reasoning is given under both of its common names."""

    body_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        prepared: PreparedRequest,
        tokenizer: TokenBytes,
        wire: ChatCompletionRequest,
        *,
        model: str,
        request_id: str,
    ) -> None:
        super().__init__(prepared, wire, model=model, request_id=request_id)
        self._logprobs = LogprobWriter(tokenizer) if wire.logprobs else None

    @override
    def first_entries(self, index: int) -> list[dict[str, Any]]:
        return [self._entry(index, {"role": "assistant", "content": ""})]

    @override
    def entry(self, index: int, piece: Piece) -> dict[str, Any]:
        if piece.kind is Kind.CONTENT:
            entries = self._logprobs.entries(self.choices[index], piece.tokens) if self._logprobs else None
            return self._entry(index, {"content": piece.text}, entries)
        if piece.kind is Kind.REASONING:
            return self._entry(index, {"reasoning": piece.text, "reasoning_content": piece.text})
        if piece.name is None:
            return self._entry(index, {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]})
        opened: ToolCallAnswer = {
            "index": piece.call,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": piece.name, "arguments": ""},
        }
        return self._entry(index, {"tool_calls": [opened]})

    @override
    def last_entry(self, index: int) -> dict[str, Any]:
        return self._entry(index, {})

    @override
    def folded_entry(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        content, reasoning, calls = "", "", list[ToolCallAnswer]()
        logprobs: list[TokenLogprob] = []
        for entry in entries:
            delta: AnswerMessage = entry["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            logprobs += (entry["logprobs"] or {"content": []})["content"]
        message: AnswerMessage = {
            "role": "assistant",
            "content": content or None,
            "reasoning": reasoning or None,
            "reasoning_content": reasoning or None,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        shown = {"content": logprobs} if self._logprobs else None
        return {"index": entries[0]["index"], "message": message, "logprobs": shown}

    def _entry(self, index: int, delta: AnswerMessage, entries: list[TokenLogprob] | None = None) -> dict[str, Any]:
        logprobs: ChatLogprobs | None = {"content": entries} if entries else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


class LogprobWriter:
    """Writes log-probabilities as chat and Responses show them."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        self._tokenizer = tokenizer

    def entries(self, choice: Choice, tokens: Sequence[TextToken]) -> list[TokenLogprob]:
        """One entry for every token with visible bytes."""
        entries: list[TokenLogprob] = []
        for token in tokens:
            logprobs = choice.logprobs_at(token.position)
            if logprobs is not None and token.data:
                top = [_named(self._tokenizer.token_bytes(token_id), logprob) for token_id, logprob in logprobs.top]
                entries.append({**_named(token.data, logprobs.logprob), "top_logprobs": top})
        return entries


def _named(data: bytes, logprob: float) -> TopLogprob:
    return {"token": data.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(data)}
