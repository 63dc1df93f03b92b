"""Token sequences to score: those of a text file, or the bundled questions with the answers of a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals import tiny
from evals.client import Client, ServerError, in_parallel, reading

TURNS = 8  # earlier questions of a long conversation, so that it is longer than a sliding window
MAX_TOKENS = 200
_PROBE = "The quick brown fox, 1234."


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """Token ids, scored from place `first` on, which is at least 1: a first token has no probability."""

    ids: list[int]
    first: int = 1


def tokens_of(client: Client, text: str) -> list[int]:
    """The server's token ids of a text, without the token that begins every text. Raises ServerError."""
    body = {"model": client.model, "prompt": text, "add_special_tokens": False}
    with reading(f"{client.base_url.removesuffix('/v1')}/tokenize"):
        return list(client.get("//tokenize", body)["tokens"])


def need_same_tokenizer(first: Client, second: Client) -> None:
    """Raise ValueError if two servers cut a text differently: then their log-probabilities say nothing together."""
    if tokens_of(first, _PROBE) != tokens_of(second, _PROBE):
        raise ValueError(f"{first.base_url} and {second.base_url} have different tokenizers: they cannot be compared")


def from_file(client: Client, path: Path, window: int) -> tuple[list[Sequence], int]:
    """The tokens of a text in pieces of `window`, the last one shorter, and the number of its bytes.

    The text is taken as it is, with its line ends. Pieces of one token are left out.

    Raises:
        ValueError: `window` is too small, or the text is empty or not UTF-8.
    """
    if window < 2:
        raise ValueError(f"--window is {window}: it must be at least 2, since a first token has no probability")
    content = path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    ids = tokens_of(client, text)
    cut = [ids[start : start + window] for start in range(0, len(ids), window)]
    pieces = [Sequence(ids=piece) for piece in cut if len(piece) > 1]
    if not pieces:
        raise ValueError(f"{path} has {len(ids)} tokens: it takes two or more")
    return pieces, len(content)


def from_questions(client: Client, count: int, concurrency: int) -> list[Sequence]:
    """`count` bundled questions, each with this server's greedy answer, then one long conversation for each 5 of them.

    Only the answers are scored, reasoning and calls included: questions are nothing that a model learned to write.

    Raises:
        ServerError: the server refuses, or does not return token ids.
    """
    chosen = [item for items in tiny.spread(tiny.load([], None), count, flag="--questions").values() for item in items]
    asked = list(in_parallel(lambda item: _ask(client, item["messages"], item.get("tools")), chosen, concurrency))
    plain = [
        (item["messages"], answer)
        for item, (_, answer) in zip(chosen, asked, strict=True)
        if answer and len(item["messages"]) == 1
    ]
    conversations = []
    for number in range(count // 5):
        turns = [plain[(number + step * 7) % len(plain)] for step in range(TURNS)] if plain else []
        history = [message for question, answer in turns for message in (*question, _said(answer))]
        conversations.append([*history, *chosen[number * 5]["messages"]])
    long = list(in_parallel(lambda messages: _ask(client, messages, None), conversations, concurrency))
    return [sequence for sequence, _ in (*asked, *long)]


def _said(answer: str) -> dict[str, Any]:
    return {"role": "assistant", "content": answer}


def _ask(client: Client, messages: list[dict[str, Any]], tools: list[Any] | None) -> tuple[Sequence, str]:
    """A question with its greedy answer, and the answer's content."""
    body = {"model": client.model, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
    reply = client.get("/chat/completions", body | {"return_token_ids": True} | ({"tools": tools} if tools else {}))
    with reading(f"{client.base_url}/chat/completions"):
        choice = reply["choices"][0]
        if "prompt_token_ids" not in reply or "token_ids" not in choice:
            raise ServerError(f"{client.base_url} does not know return_token_ids: give a text with --text FILE")
        prompt = reply["prompt_token_ids"]
        return Sequence(ids=[*prompt, *choice["token_ids"]], first=len(prompt)), choice["message"].get("content") or ""
