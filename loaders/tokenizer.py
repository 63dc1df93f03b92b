"""`Tokenizer`: text to ids and back, exact bytes of every id, and the chat template's text. Renders no template.

Built on the `tokenizers` library alone, because importing transformers would double the start-up time. Only byte-level
BPE is supported, the kind of both model families: there every id stands for a fixed byte string.
"""

import codecs
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as RustTokenizer

from loaders.bos_token import find_bos
from loaders.chat_templates import DEFAULT, TOOL_USE, TemplateText, read_chat_templates, written_markers
from loaders.end_tokens import read_end_token_ids
from loaders.errors import TokenizerError
from loaders.markers import MARKERS
from loaders.token_bytes import max_token_bytes
from loaders.token_settings import add_declared_tokens, flag_special, named_tokens, read_settings


class Tokenizer:
    """One model's tokenizer. Ids are the file's; nothing is added before or after a text."""

    def __init__(
        self,
        rust: RustTokenizer,
        names: Mapping[str, str],
        templates: Mapping[str, TemplateText],
        *,
        adds_bos: bool,
    ) -> None:
        """Wrap a loaded tokenizer; `names` are its named tokens, such as "bos_token"."""
        self._rust = rust
        added = rust.get_added_tokens_decoder()
        self._bytes_of = {token_id: token.content.encode() for token_id, token in added.items()}  # grows with use
        self.special_tokens: dict[str, int] = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        """The control tokens, name to id. Other added tokens are text."""
        self._special_ids = frozenset(self.special_tokens.values())
        self.chat_template = templates.get(DEFAULT)
        self.tool_template = templates.get(TOOL_USE)
        """Takes the place of `chat_template` in conversations with tools; None if the model has no other for them."""
        self.named_tokens = dict(names)
        """The tokens that templates read by name, such as "bos_token", with their text."""
        self.adds_bos = adds_bos
        """True when a raw prompt (not a rendered template) should start with the token called "bos_token"."""

    def encode(self, text: str, *, allow_special: bool = True) -> list[int]:
        """Ids of a text. With `allow_special=False`, "<|start|>" in the text is spelled out like any other text."""
        ids = _encode(self._rust, text)
        if not allow_special and not self._special_ids.isdisjoint(ids):
            ids = _encode(self._plain, text)
        return ids

    def decode(self, ids: list[int], *, skip_special: bool = False) -> str:
        """Text of ids; incomplete UTF-8 becomes U+FFFD. Special tokens appear by name unless skipped."""
        kept = (i for i in ids if not (skip_special and i in self._special_ids))
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
        """The same tokenizer without control tokens; built when a text first contains one, which takes a second."""
        spec = json.loads(self._rust.to_str())
        spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["special"]]
        model = spec["model"]
        merges = model.get("merges", [])
        merged = {m.replace(" ", "") if isinstance(m, str) else "".join(m) for m in merges}
        # A control token in the base vocabulary could still match a whole word; nothing else can produce it.
        for content in self.special_tokens:
            if content not in merged and len(content) > 1:
                model["vocab"].pop(content, None)
        # Without an entry there, an added token would get the next free id, which was a control token's.
        model["vocab"] |= {token["content"]: token["id"] for token in spec["added_tokens"]}
        return RustTokenizer.from_str(json.dumps(spec))


def _encode(rust: RustTokenizer, text: str) -> list[int]:
    """Ids of a text. Of the library's calls this one lets other threads run meanwhile, and computes no offsets."""
    [encoding] = rust.encode_batch_fast([text], add_special_tokens=False)
    return list(encoding.ids)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read tokenizer.json and the small files beside it: settings, special tokens, chat templates.

    Raises:
        TokenizerError: a file is missing or damaged, the tokenizer is not byte-level BPE, or what it puts around a raw
            prompt is more than a BOS token.
        ModelConfigError: an `eos_token_id` is no id, or none that the model has.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            f"{path}: missing; only tokenizer.json files are read, no SentencePiece or tiktoken files: take an upload "
            "that has one, or let transformers write it (AutoTokenizer.from_pretrained, then save_pretrained)"
        )
    try:
        rust = RustTokenizer.from_buffer(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except Exception as error:  # the library raises bare Exception for anything wrong with the file
        raise TokenizerError(f"{path}: cannot be read: {error}") from error
    if "ByteLevel" not in _decoder_types(rust):
        raise TokenizerError(f"{path}: only byte-level BPE tokenizers are supported, its decoder is not ByteLevel")
    rust.no_truncation()
    rust.no_padding()
    settings = read_settings(folder)
    special = add_declared_tokens(rust, settings, folder)
    names = named_tokens(settings)
    bos_token, adds_bos = find_bos(rust, settings, names.get("bos_token"), folder)
    if bos_token is not None:
        names["bos_token"] = bos_token
    templates = read_chat_templates(folder, settings)
    # Control tokens: what a file calls special, what begins prompts or ends answers, the markers of the syntaxes, and
    # those that chat templates write.
    added = (token.content for token in rust.get_added_tokens_decoder().values())
    control = MARKERS | special | written_markers(templates, added) | {names.get("bos_token", "")}
    flag_special(rust, control, read_end_token_ids(folder))
    return Tokenizer(rust, names, templates, adds_bos=adds_bos)


def _decoder_types(rust: RustTokenizer) -> set[str]:
    if rust.decoder is None:
        return set()
    state = json.loads(rust.decoder.__getstate__())
    return {part["type"] for part in [state, *state.get("decoders", [])]}


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
