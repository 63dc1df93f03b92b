"""The longest token's bytes bound how few tokens a text can have (G81); no bound where a tokenizer can lose text."""

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer

from loaders.token_bytes import max_token_bytes
from loaders.tokenizer import _BYTE_OF, _spelled_bytes, load_tokenizer

FILE = Path(__file__).parents[2] / "assets" / "tiny-gpt-oss" / "tokenizer.json"
TOKENIZER = load_tokenizer(FILE.parent)


def measured(change=lambda _spec: None):
    spec = json.loads(FILE.read_text())
    change(spec)
    return max_token_bytes(RustTokenizer.from_str(json.dumps(spec)), _spelled_bytes, set(_BYTE_OF))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from([*TOKENIZER.special_tokens, " ", "\n", "é", "漢", "Paris", "\0", "🦜"]) | st.text()))
def test_no_text_has_fewer_tokens_than_the_bound_says_g81(parts):
    text = "".join(parts)
    assert len(TOKENIZER.encode(text)) * TOKENIZER.max_token_bytes >= len(text.encode())


def test_the_longest_token_may_be_a_control_token_g81():
    longest = max(len(name.encode()) for name in TOKENIZER.special_tokens)
    assert TOKENIZER.max_token_bytes == longest


LOSES_TEXT = {
    "normalizer": lambda spec: spec.update(normalizer={"type": "NFC"}),
    "nested normalizer": lambda spec: spec.update(
        normalizer={"type": "Sequence", "normalizers": [{"type": "Strip", "strip_left": True, "strip_right": True}]}
    ),
    "removing split": lambda spec: spec["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
    "whitespace": lambda spec: spec["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "WhitespaceSplit"}),
    "stripping token": lambda spec: spec["added_tokens"][0].update(rstrip=True),
    "byte without a token": lambda spec: spec["model"]["vocab"].pop("Ā"),
}


def test_no_bound_where_text_can_vanish_g81():
    for change in LOSES_TEXT.values():
        assert measured(change) is None, change


def test_an_empty_sequence_of_normalizers_changes_nothing_g81():
    """As DeepSeek-V3's file has it."""
    empty = measured(lambda spec: spec.update(normalizer={"type": "Sequence", "normalizers": []}))
    assert empty == measured() == TOKENIZER.max_token_bytes
