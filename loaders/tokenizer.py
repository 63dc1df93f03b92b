"""`Tokenizer`: text to ids and back, exact bytes of every id, and the chat template's text. Renders no template.

Built on the `tokenizers` library alone, because importing transformers would double the start-up time. Only byte-level
BPE is supported, the kind of both model families: there every id stands for a fixed byte string.
"""

import codecs
import json
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from loaders.bos_token import find_bos
from loaders.errors import TokenizerError
from loaders.json_text import parse_json
from loaders.token_bytes import max_token_bytes


class Tokenizer:
    """One model's tokenizer. Ids are the file's; nothing is added before or after a text."""

    def __init__(
        self, rust: RustTokenizer, settings: dict[str, Any], chat_template: str | None, chat_template_file: str = ""
    ) -> None:
        """Wrap a loaded tokenizer; `settings` is tokenizer_config.json."""
        self._rust = rust
        self._content_of = {token_id: token.content for token_id, token in rust.get_added_tokens_decoder().items()}
        self._bytes_of = {
            token_id: content.encode() for token_id, content in self._content_of.items()
        }  # grows with use
        self.special_tokens: dict[str, int] = {content: token_id for token_id, content in self._content_of.items()}
        """Every added token (control tokens, whether flagged special or not), name to id."""
        self.chat_template = chat_template
        self.chat_template_file = chat_template_file
        """Where the template comes from; for messages."""
        self.bos_token = _token_text(settings.get("bos_token"))
        self.eos_token = _token_text(settings.get("eos_token"))
        self.adds_bos = bool(settings.get("add_bos_token", False))
        """True when a raw prompt (not a rendered template) should start with `bos_token`."""

    def encode(self, text: str, *, allow_special: bool = True) -> list[int]:
        """Ids of a text. With `allow_special=False`, "<|start|>" in the text is spelled out like any other text."""
        ids = _encode(self._rust, text)
        if not allow_special and not self._content_of.keys().isdisjoint(ids):
            ids = _encode(self._plain, text)
        return ids

    def decode(self, ids: list[int], *, skip_special: bool = False) -> str:
        """Text of ids; incomplete UTF-8 becomes U+FFFD. Special tokens appear by name unless skipped."""
        kept = (i for i in ids if not (skip_special and i in self._content_of))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one id; empty for an id that only the model's padded vocabulary has.

        Raises:
            TokenizerError: a negative id.
        """
        data = self._bytes_of.get(token_id)
        if data is not None:
            return data
        if token_id < 0:
            raise TokenizerError(f"token id is {token_id}: it must not be negative")
        token = self._rust.id_to_token(token_id)
        if token is None:
            return b""
        return self._bytes_of.setdefault(token_id, _spelled_bytes(token))

    @cached_property
    def vocab_size(self) -> int:
        """Highest id plus one. The model's own vocabulary may be padded beyond it."""
        return max(self._rust.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def max_token_bytes(self) -> int | None:
        """Most bytes of text that one token can stand for; None if text can vanish without a token."""
        return max_token_bytes(self._rust, _spelled_bytes, set(_BYTE_OF))

    @cached_property
    def _plain(self) -> RustTokenizer:
        """The same tokenizer without added tokens; built when a text first contains one, which takes a second."""
        spec = json.loads(self._rust.to_str())
        spec["added_tokens"] = []
        model = spec["model"]
        merges = model.get("merges", [])
        merged = {m.replace(" ", "") if isinstance(m, str) else "".join(m) for m in merges}
        # A control token in the base vocabulary could still match a whole word; nothing else can produce it.
        for content in self.special_tokens:
            if content not in merged and len(content) > 1:
                model["vocab"].pop(content, None)
        return RustTokenizer.from_str(json.dumps(spec))


def _encode(rust: RustTokenizer, text: str) -> list[int]:
    """Ids of a text. Of the library's calls this one lets other threads run meanwhile, and computes no offsets."""
    [encoding] = rust.encode_batch_fast([text], add_special_tokens=False)
    return list(encoding.ids)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read tokenizer.json, tokenizer_config.json and chat_template.jinja (which wins over the config's template).

    Raises:
        TokenizerError: a file is missing or damaged, the tokenizer is not byte-level BPE, or what it puts around a raw
            prompt is more than a BOS token.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"{path}: missing; only tokenizer.json files are read, no SentencePiece or tiktoken files")
    try:
        rust = RustTokenizer.from_buffer(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except Exception as error:  # the library raises bare Exception for anything wrong with the file
        raise TokenizerError(f"{path}: cannot be read: {error}") from error
    if "ByteLevel" not in _decoder_types(rust):
        raise TokenizerError(f"{path}: only byte-level BPE tokenizers are supported, its decoder is not ByteLevel")
    rust.no_truncation()
    rust.no_padding()
    settings = _read_settings(folder / "tokenizer_config.json")
    _add_missing_tokens(rust, settings.get("added_tokens_decoder") or {}, folder / "tokenizer_config.json")
    bos_token, adds_bos = find_bos(rust, settings, _token_text(settings.get("bos_token")), folder)
    settings |= {"bos_token": bos_token, "add_bos_token": adds_bos}
    return Tokenizer(rust, settings, *_chat_template(folder, settings))


def _decoder_types(rust: RustTokenizer) -> set[str]:
    if rust.decoder is None:
        return set()
    state = json.loads(rust.decoder.__getstate__())
    return {part["type"] for part in [state, *state.get("decoders", [])]}


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = parse_json(path.read_bytes())
    except ValueError as error:
        raise TokenizerError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(settings, dict):
        raise TokenizerError(f"{path}: must hold a JSON object")
    return settings


def _add_missing_tokens(rust: RustTokenizer, declared: Any, path: Path) -> None:
    """Add tokens that only tokenizer_config.json knows; they must land on the ids it gives them."""
    for token_id, entry in _declared_tokens(declared, path):
        content = entry["content"]
        if rust.token_to_id(content) is None:
            flags = {
                flag: bool(entry[flag]) for flag in ("lstrip", "rstrip", "single_word", "normalized") if flag in entry
            }
            rust.add_tokens([AddedToken(content, special=bool(entry.get("special")), **flags)])
        found = rust.token_to_id(content)
        if found != token_id:
            raise TokenizerError(
                f"{path}: token '{content}' should have id {token_id}, "
                f"but tokenizer.json gives it {found}; the two files do not belong together"
            )


def _declared_tokens(declared: Any, path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The entries of added_tokens_decoder in the order of their ids."""
    if not isinstance(declared, dict):
        raise TokenizerError(f"{path}: added_tokens_decoder must be an object from token ids to tokens")
    for key, entry in declared.items():
        if not (key.isascii() and key.isdigit()):
            raise TokenizerError(f"{path}: added_tokens_decoder has the key '{key}', which is not a token id")
        if not (isinstance(entry, dict) and isinstance(entry.get("content"), str) and entry["content"]):
            raise TokenizerError(
                f"{path}: added_tokens_decoder[{key}] must be an object with the token's text as content"
            )
    return sorted(((int(key), entry) for key, entry in declared.items()), key=lambda item: item[0])


def _chat_template(folder: Path, settings: dict[str, Any]) -> tuple[str | None, str]:
    """The template's text and the file it comes from."""
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8-sig"), str(file)
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{file}: is not UTF-8: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        for index, entry in enumerate(template):
            if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
                raise TokenizerError(f"{config}: chat_template[{index}] must be an object with a name and a template")
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not (template is None or isinstance(template, str)):
        raise TokenizerError(f"{config}: chat_template must be text or a list of named templates")
    return template, str(config)


def _token_text(value: Any) -> str | None:
    """A token in tokenizer_config.json is a string or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 stands for itself, the other 68 bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _spelled_bytes(token: str) -> bytes:
    """Bytes of a vocabulary entry; an entry with letters outside the alphabet stands for its own UTF-8."""
    try:
        return bytes(_BYTE_OF[letter] for letter in token)
    except KeyError:
        return token.encode()
