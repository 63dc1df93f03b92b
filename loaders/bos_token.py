"""Whether a raw prompt begins with BOS, and which token that is: from the tokenizer's settings, else tokenizer.json.

If the settings have `add_bos_token` or `add_eos_token`, they replace what the post-processor of tokenizer.json
puts around a text: the rule of Llama tokenizers, which DeepSeek uses. If it has neither, the post-processor decides.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from loaders.errors import TokenizerError


def find_bos(
    rust: RustTokenizer, settings: Mapping[str, Any], bos_token: str | None, folder: Path
) -> tuple[str | None, bool]:
    """(BOS token, whether raw prompts begin with it); `bos_token` is what the settings name.

    Raises:
        TokenizerError: the post-processor puts anything but one BOS around a text, or a BOS that should begin prompts
            is not named or is not a token.
    """
    if "add_bos_token" in settings or "add_eos_token" in settings:
        adds_bos = bool(settings.get("add_bos_token"))
        if adds_bos and bos_token is None:
            raise TokenizerError(
                f"{folder / 'tokenizer_config.json'}: add_bos_token is true, but no bos_token is named; name it there, "
                "or set add_bos_token to false"
            )
    else:
        first = _token_before_text(rust, folder / "tokenizer.json")
        adds_bos = first is not None
        if first is not None and bos_token not in (None, first):
            raise TokenizerError(
                f"{folder / 'tokenizer.json'}: its post-processor begins a text with '{first}', but bos_token is "
                f"'{bos_token}'; set add_bos_token in tokenizer_config.json to say which is right"
            )
        bos_token = bos_token or first
    if adds_bos and bos_token not in {token.content for token in rust.get_added_tokens_decoder().values()}:
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: bos_token '{bos_token}' should begin a prompt, but it is not among "
            "the tokens of tokenizer.json"
        )
    return bos_token, adds_bos


def _token_before_text(rust: RustTokenizer, path: Path) -> str | None:
    """The one token that the post-processor puts before a text; None if it adds nothing."""
    encoding = rust.encode("a", add_special_tokens=True)
    added = [i for i, sequence in enumerate(encoding.sequence_ids) if sequence is None]
    if not added:
        return None
    if added != [0]:
        names = ", ".join(f"'{encoding.tokens[i]}'" for i in added)
        raise TokenizerError(
            f"{path}: its post-processor puts {names} around a text; only one token before it is supported: say with "
            "add_bos_token in tokenizer_config.json whether a prompt begins with bos_token"
        )
    return str(encoding.tokens[0])
