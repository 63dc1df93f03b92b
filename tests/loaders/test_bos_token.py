"""Field report G42: raw prompts begin with BOS where the files say so, in whichever file they say it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from loaders.errors import TokenizerError
from loaders.tokenizer import load_tokenizer
from server.convert import Converter
from tests.tables import rows

BOS, EOS, CLS = "<|begin|>", "<|end|>", "<|cls|>"
IDS = {BOS: 256, EOS: 257, CLS: 258}


def template(single: str) -> processors.PostProcessor:
    return processors.TemplateProcessing(single=single, special_tokens=list(IDS.items()))


def write(folder: Path, processor: Any, **settings: Any) -> Path:
    letters = pre_tokenizers.ByteLevel.alphabet()
    rust = RustTokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(sorted(letters))}, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(token, normalized=False) for token in IDS])
    if processor is not None:
        rust.post_processor = processor
    rust.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


BYTE_LEVEL = processors.ByteLevel(trim_offsets=False)
ACCEPTED: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "only in the post-processor": (template(f"{BOS} $A"), {}, True),
    "in the post-processor, named in the config": (template(f"{BOS} $A"), {"bos_token": BOS}, True),
    "second in a sequence": (processors.Sequence([BYTE_LEVEL, template(f"{BOS} $A")]), {"bos_token": BOS}, True),
    "named but added by nobody": (None, {"bos_token": BOS}, False),
    "a post-processor without special tokens": (BYTE_LEVEL, {"bos_token": BOS}, False),
    "switched on in the config": (BYTE_LEVEL, {"bos_token": BOS, "add_bos_token": True}, True),
    "switched off in the config": (template(f"{BOS} $A"), {"bos_token": BOS, "add_bos_token": False}, False),
    "the config replaces what is appended": (
        template(f"{BOS} $A {EOS}"),
        {"bos_token": BOS, "eos_token": EOS, "add_bos_token": True, "add_eos_token": False},
        True,
    ),
}


@rows("case", *ACCEPTED)
def test_g42_a_raw_prompt_begins_with_bos_where_the_files_say_so(tmp_path: Path, case: str) -> None:
    processor, settings, adds_bos = ACCEPTED[case]
    tokenizer = load_tokenizer(write(tmp_path, processor, **settings))
    assert tokenizer.adds_bos is adds_bos
    assert raw_ids(tokenizer, "hi") == [*[IDS[BOS]] * adds_bos, 71, 72]


def raw_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids as the completions route makes them."""
    converter = Converter.__new__(Converter)
    converter.tokenizer = tokenizer
    return converter.raw_ids(text)


@rows(
    "processor, settings, words",
    (template(f"{BOS} $A {EOS}"), {"bos_token": BOS}, r"puts '<\|begin\|>', '<\|end\|>' around a text"),
    (template(f"$A {EOS}"), {}, "only one token before it is supported"),
    (template(f"{CLS} {BOS} $A"), {"bos_token": BOS}, "add_bos_token in tokenizer_config.json"),
    (template(f"{CLS} $A"), {"bos_token": BOS}, r"begins a text with '<\|cls\|>', but bos_token .* '<\|begin\|>'"),
    (None, {"add_bos_token": True}, "add_bos_token is true, but no bos_token is named"),
    (None, {"bos_token": "<s>", "add_bos_token": True}, "bos_token '<s>' .* not among the tokens"),
)
def test_g42_anything_else_around_a_prompt_is_refused(
    tmp_path: Path, processor: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(TokenizerError, match=words):
        load_tokenizer(write(tmp_path, processor, **settings))
