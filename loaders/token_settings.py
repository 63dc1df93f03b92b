"""What the small files beside tokenizer.json say about tokens, put together as transformers does.

tokenizer_config.json comes first. If it has no `added_tokens_decoder`, the files of older exports count as well:
special_tokens_map.json, whose entries win, and added_tokens.json.
"""

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from loaders.errors import TokenizerError
from loaders.json_text import read_optional_object

_DECLARED = "added_tokens_decoder"
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def read_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json with what special_tokens_map.json adds; empty if the folder has neither.

    Raises:
        TokenizerError: a file is not a JSON object.
    """
    settings = _read_object(folder / "tokenizer_config.json")
    if _DECLARED not in settings:
        more = _read_object(folder / "special_tokens_map.json")
        settings |= {key: value for key, value in more.items() if value is not None}
    return settings


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that have a name, such as "bos_token" and "pad_token", with their text."""
    extra = settings.get("extra_special_tokens")
    given = {key: value for key, value in settings.items() if key.endswith("_token")}
    given |= extra if isinstance(extra, dict) else {}
    return {name: text for name, value in given.items() if (text := _token_text(value)) is not None}


def add_declared_tokens(rust: RustTokenizer, settings: Mapping[str, Any], folder: Path) -> frozenset[str]:
    """Make one token of each text that the small files declare to be one. Ids always come from the files.

    Returns the texts that they call special; some may be no tokens, or words.

    Raises:
        TokenizerError: a declaration is malformed, or gives a token another id than tokenizer.json.
    """
    special = _special_texts(settings)
    if _DECLARED in settings:
        path, declared = folder / "tokenizer_config.json", _from_config(settings[_DECLARED] or {}, folder)
    else:
        path, declared = folder / "added_tokens.json", _from_added_tokens(folder / "added_tokens.json", special)
    known = {token.content for token in rust.get_added_tokens_decoder().values()}
    for token_id, token in sorted(declared.items()):
        before = rust.token_to_id(token.content)
        if token.content not in known:
            rust.add_tokens([token])
        found = rust.token_to_id(token.content)
        if found != token_id:
            reason = f"gives it {found}" if before is not None else f"lacks it, and its next free id is {found}"
            raise TokenizerError(
                f"{path}: token '{token.content}' should have id {token_id}, but tokenizer.json {reason}; "
                "the two files do not belong together"
            )
    known |= {token.content for token in declared.values()}
    names = named_tokens(settings)  # any other may be a word, and answers do not show special tokens
    ends = (text for key in ("bos_token", "eos_token") if (text := names.get(key)) is not None and text not in known)
    in_vocabulary = [text for text in ends if rust.token_to_id(text) is not None]
    rust.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in in_vocabulary])
    return frozenset(special).union(token.content for token in declared.values() if token.special)


def flag_special(rust: RustTokenizer, texts: Set[str], ids: Sequence[int]) -> None:
    """Flag the added tokens with these texts or ids special; all else about them stays."""
    flagged = [
        AddedToken(token.content, special=True, **{flag: getattr(token, flag) for flag in _FLAGS})
        for token_id, token in rust.get_added_tokens_decoder().items()
        if (token.content in texts or token_id in ids) and not token.special
    ]
    if flagged:
        rust.add_special_tokens(flagged)  # in one call: each builds the library's matcher anew


def _special_texts(settings: Mapping[str, Any]) -> list[str]:
    """Texts of the special tokens, with a name or without, each once."""
    nameless = [settings.get(key) for key in ("extra_special_tokens", "additional_special_tokens")]
    entries = [entry for group in nameless if isinstance(group, list) for entry in group]
    return list(dict.fromkeys([*named_tokens(settings).values(), *filter(None, map(_token_text, entries))]))


def _from_config(declared: Any, folder: Path) -> dict[int, AddedToken]:
    """The tokens of `added_tokens_decoder` by id."""
    path = folder / "tokenizer_config.json"
    if not isinstance(declared, dict):
        raise TokenizerError(f"{path}: {_DECLARED} must be an object from token ids to tokens")
    tokens = {}
    for key, entry in declared.items():
        if not (key.isascii() and key.isdigit()):
            raise TokenizerError(f"{path}: {_DECLARED} has the key '{key}', which is not a token id")
        if not (isinstance(entry, dict) and isinstance(entry.get("content"), str) and entry["content"]):
            raise TokenizerError(f"{path}: {_DECLARED}[{key}] must be an object with the token's text as content")
        flags = {flag: bool(entry[flag]) for flag in _FLAGS if flag in entry}
        tokens[int(key)] = AddedToken(entry["content"], special=bool(entry.get("special")), **flags)
    return tokens


def _from_added_tokens(path: Path, special: list[str]) -> dict[int, AddedToken]:
    """The tokens of added_tokens.json by id."""
    tokens = {}
    for text, token_id in _read_object(path).items():
        if not text or not isinstance(token_id, int) or isinstance(token_id, bool):
            raise TokenizerError(f"{path}: '{text}' is {token_id!r}: it must be the id of a token")
        tokens[token_id] = AddedToken(text, special=text in special)
    return tokens


def _read_object(path: Path) -> dict[str, Any]:
    return read_optional_object(path, TokenizerError) or {}


def _token_text(value: Any) -> str | None:
    """A token is a string or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
