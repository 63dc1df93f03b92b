"""The most bytes of text that one token can stand for. Callers use it to bound how many tokens a text has."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

_KEEPING = ("ByteLevel", "Split", "Digits", "Punctuation")  # pre-tokenizers that pass all text on


def max_token_bytes(rust: RustTokenizer, spelled_bytes: Callable[[str], bytes], alphabet: set[str]) -> int | None:
    """Bytes of the longest token, if no text of N bytes can have fewer than N / that many tokens; else None.

    None if the tokenizer can drop text without a token: a normalizer (NFC joins characters), a pre-tokenizer that
    removes what it splits at, an added token that swallows the spaces beside it, or a vocabulary without some byte of
    `alphabet`, which BPE drops when it has no unknown token.
    """
    state = json.loads(rust.to_str())
    vocab = state["model"].get("vocab", {})
    loses_text = (
        any(True for _ in _parts(state.get("normalizer"), "normalizers"))
        or any(map(_removes_text, _parts(state.get("pre_tokenizer"), "pretokenizers")))
        or any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"])
        or not alphabet.issubset(vocab)
    )
    if loses_text:
        return None
    lengths = [len(spelled_bytes(token)) for token in vocab]
    return max(lengths + [len(token["content"].encode()) for token in state["added_tokens"]])


def _parts(part: Any, key: str) -> Iterator[Any]:
    """The members of a `Sequence`, nested ones too, or the part itself; none for a part that is absent."""
    if part is None:
        return
    if part.get("type") == "Sequence":
        for member in part[key]:
            yield from _parts(member, key)
    else:
        yield part


def _removes_text(pre_tokenizer: Any) -> bool:
    return pre_tokenizer["type"] not in _KEEPING or pre_tokenizer.get("behavior") == "Removed"
