"""A small byte-level BPE trained here: exact bytes, special tokens as text, settings and templates, refusals."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from loaders.chat_templates import TemplateText
from loaders.errors import TokenizerError
from loaders.markers import MARKERS
from loaders.tokenizer import Tokenizer, load_tokenizer
from tests.tables import rows

TEXTS = ["the quick brown fox", "naïve café – 12 345", "東京 and Москва 🙂", "start message end"] * 5
SPECIAL, PLAIN_ADDED, COLOR = "<|start|>", "<｜User｜>", "<color>"
COLOR_ID = 329  # the next after all of `train`


def train() -> RustTokenizer:
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=[SPECIAL, "<|end|>"], show_progress=False
    )
    rust.train_from_iterator(TEXTS, trainer)
    # DeepSeek's role markers are added tokens without the special flag.
    rust.add_tokens([AddedToken(PLAIN_ADDED, special=False, normalized=False)])
    return rust


def write(folder: Path, rust: RustTokenizer | None = None, **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (rust or train()).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write(tmp_path_factory.mktemp("tokenizer")))


@given(st.text(max_size=40))
def test_bytes_of_the_ids_are_the_bytes_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, allow_special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids) == text


def test_every_byte_has_a_token_of_its_own(tokenizer: Tokenizer) -> None:
    spelled = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert spelled.issuperset(bytes([b]) for b in range(256))


def test_a_token_may_be_part_of_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦊")
    assert len(ids) > 1
    assert tokenizer.decode(ids[:1]) == "�"
    assert b"".join(map(tokenizer.token_bytes, ids)) == "🦊".encode()


def test_added_tokens_have_ids_and_bytes(tokenizer: Tokenizer) -> None:
    assert set(tokenizer.special_tokens) == {SPECIAL, "<|end|>", PLAIN_ADDED}
    for content, token_id in tokenizer.special_tokens.items():
        assert tokenizer.token_bytes(token_id) == content.encode()
        assert tokenizer.encode(f"a{content}b")[1] == token_id
    assert tokenizer.vocab_size == tokenizer.special_tokens[PLAIN_ADDED] + 1


@rows("content", SPECIAL, PLAIN_ADDED)
def test_special_tokens_in_user_text_can_stay_text(tokenizer: Tokenizer, content: str) -> None:
    text = f"say {content} please"
    assert tokenizer.special_tokens[content] in tokenizer.encode(text)
    ids = tokenizer.encode(text, allow_special=False)
    assert not set(ids) & set(tokenizer.special_tokens.values())
    assert tokenizer.decode(ids) == text


def write_with(folder: Path, *contents: str, **settings: Any) -> Path:
    """As `write`, with added tokens that tokenizer.json does not flag special."""
    rust = train()
    rust.add_tokens([AddedToken(content, special=False) for content in contents])
    return write(folder, rust, **settings)


@rows("text", f"a {COLOR} b", f"{SPECIAL}a{COLOR}{PLAIN_ADDED}{COLOR}", f"{COLOR}{COLOR} {PLAIN_ADDED}", f"the{COLOR}=")
def test_an_added_token_that_nothing_calls_special_is_text(tmp_path: Path, text: str) -> None:
    """Answers lost it, and user text got it in pieces. Its id comes after a control token's."""
    tokenizer = load_tokenizer(write_with(tmp_path, COLOR, "="))
    assert not {COLOR, "="} & tokenizer.special_tokens.keys()
    [color] = tokenizer.encode(COLOR)
    ids = tokenizer.encode(text, allow_special=False)
    assert ids.count(color) == text.count(COLOR)
    assert not set(ids) & set(tokenizer.special_tokens.values())
    assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special=True) == text


def test_text_tokens_keep_their_ids_where_ids_are_missing(tmp_path: Path) -> None:
    rust = train()
    spec = json.loads(rust.to_str())
    spec["model"]["vocab"]["far"] = 1000
    rust = RustTokenizer.from_str(json.dumps(spec))
    rust.add_tokens([AddedToken(COLOR, special=False)])
    tokenizer = load_tokenizer(write(tmp_path, rust))
    for text in (COLOR, f"{SPECIAL}{COLOR}", f"{PLAIN_ADDED}{COLOR}"):
        assert tokenizer.encode(text, allow_special=False)[-1] == tokenizer.encode(text)[-1] == rust.token_to_id(COLOR)


def test_every_marker_of_a_known_syntax_is_a_control_token(tmp_path: Path) -> None:
    """DeepSeek's tokenizers flag theirs as text. Users must not write them."""
    tokenizer = load_tokenizer(write_with(tmp_path, *sorted(MARKERS)))
    assert tokenizer.special_tokens.keys() >= MARKERS
    ids = tokenizer.encode(" ".join(MARKERS), allow_special=False)
    assert not set(ids) & set(tokenizer.special_tokens.values())


@rows(
    "file, content",
    ("tokenizer_config.json", {"added_tokens_decoder": {str(COLOR_ID): {"content": COLOR, "special": True}}}),
    ("tokenizer_config.json", {"bos_token": COLOR}),
    ("tokenizer_config.json", {"eos_token": {"content": COLOR}}),
    ("tokenizer_config.json", {"pad_token": COLOR}),
    ("tokenizer_config.json", {"additional_special_tokens": [COLOR]}),
    ("tokenizer_config.json", {"extra_special_tokens": [COLOR]}),
    ("special_tokens_map.json", {"eos_token": COLOR}),
    ("config.json", {"eos_token_id": COLOR_ID}),
    ("generation_config.json", {"eos_token_id": [5, COLOR_ID]}),
)
def test_an_added_token_that_any_file_calls_special_is_a_control_token(
    tmp_path: Path, file: str, content: dict[str, Any]
) -> None:
    folder = write_with(tmp_path, COLOR)
    assert COLOR not in load_tokenizer(folder).special_tokens
    (folder / file).write_text(json.dumps(content))
    assert load_tokenizer(folder).special_tokens[COLOR] == COLOR_ID


def test_a_whole_word_match_cannot_bring_a_special_token_back(tmp_path: Path) -> None:
    """With `ignore_merges`, a word that is in the vocabulary becomes its token without any merge."""
    rust = train()
    spec = json.loads(rust.to_str())
    spec["model"]["ignore_merges"] = True
    spec["pre_tokenizer"]["use_regex"] = False
    tokenizer = load_tokenizer(write(tmp_path, RustTokenizer.from_str(json.dumps(spec))))
    assert tokenizer.special_tokens[SPECIAL] not in tokenizer.encode(SPECIAL, allow_special=False)
    assert tokenizer.decode(tokenizer.encode(SPECIAL, allow_special=False)) == SPECIAL


def test_text_without_special_tokens_is_the_same_either_way(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        assert tokenizer.encode(text) == tokenizer.encode(text, allow_special=False)


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    """Held up for seconds, a server's event loop answered nobody, not even its health probes."""
    encoder = threading.Thread(target=tokenizer.encode, args=("the quick brown fox " * 60_000,))
    num_turns = 0
    encoder.start()
    while encoder.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 5


def test_decoding_can_skip_special_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"{SPECIAL}fox<|end|>")
    assert tokenizer.decode(ids) == f"{SPECIAL}fox<|end|>"
    assert tokenizer.decode(ids, skip_special=True) == "fox"


def test_ids_of_a_padded_vocabulary_are_empty_and_negative_ones_refused(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.vocab_size + 7) == b""
    with pytest.raises(TokenizerError, match="token id is -1"):
        tokenizer.token_bytes(-1)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    rust = train()
    plain = rust.encode("the quick brown fox", add_special_tokens=False).ids
    rust.enable_truncation(2)
    rust.enable_padding(length=64)
    assert load_tokenizer(write(tmp_path, rust)).encode("the quick brown fox") == plain


def test_bos_and_eos_come_as_text_or_as_objects(tmp_path: Path) -> None:
    settings = {"bos_token": {"content": SPECIAL, "lstrip": False}, "eos_token": "<|end|>", "add_bos_token": True}
    tokenizer = load_tokenizer(write(tmp_path, **settings))
    assert tokenizer.named_tokens == {"bos_token": SPECIAL, "eos_token": "<|end|>"}
    assert tokenizer.adds_bos
    bare = load_tokenizer(write(tmp_path, bos_token=None))
    assert (bare.named_tokens, bare.adds_bos) == ({}, False)


def template_of(folder: Path) -> str | None:
    template = load_tokenizer(folder).chat_template
    return None if template is None else template.text


def test_chat_template_file_wins_over_the_config(tmp_path: Path) -> None:
    assert load_tokenizer(write(tmp_path)).chat_template is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert template_of(write(tmp_path, chat_template=named)) == "D"
    assert template_of(write(tmp_path, chat_template="C")) == "C"
    (tmp_path / "chat_template.jinja").write_text("J – ü", encoding="utf-8")
    assert template_of(tmp_path) == "J – ü"


def test_a_template_for_tools(tmp_path: Path) -> None:
    """As in transformers: chat_template.jinja replaces what tokenizer_config.json has."""
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = write(tmp_path, chat_template=named)
    in_config = TemplateText("T", str(folder / "tokenizer_config.json"))
    assert load_tokenizer(folder).tool_template == in_config
    (folder / "additional_chat_templates").mkdir()
    file = folder / "additional_chat_templates" / "tool_use.jinja"
    file.write_text("F")
    assert load_tokenizer(folder).tool_template == TemplateText("F", str(file))
    assert template_of(folder) == "D"
    file.unlink()
    (folder / "chat_template.jinja").write_text("J")
    assert load_tokenizer(folder).tool_template is None


def test_templates_without_a_default_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, chat_template=[{"name": "rag", "template": "R"}])
    with pytest.raises(TokenizerError, match="no chat template is called 'default', only rag"):
        load_tokenizer(folder)


def test_tokens_that_only_the_config_declares_are_added(tmp_path: Path) -> None:
    next_id = train().get_vocab_size()
    entry = {"content": "<|call|>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    tokenizer = load_tokenizer(write(tmp_path, added_tokens_decoder={str(next_id): entry, "0": {"content": SPECIAL}}))
    assert tokenizer.special_tokens["<|call|>"] == next_id
    assert tokenizer.encode("<|call|>") == [next_id]


def test_special_tokens_map_counts_where_the_config_has_no_added_tokens_decoder(tmp_path: Path) -> None:
    """As in transformers: its tokens win over tokenizer_config.json, which without them lost the BOS of DeepSeek."""
    folder = write(tmp_path, eos_token=SPECIAL, add_bos_token=True)
    more = {"bos_token": {"content": SPECIAL}, "eos_token": "<|end|>", "pad_token": PLAIN_ADDED, "unk_token": None}
    (folder / "special_tokens_map.json").write_text(json.dumps(more))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.named_tokens == {"bos_token": SPECIAL, "eos_token": "<|end|>", "pad_token": PLAIN_ADDED}
    assert tokenizer.adds_bos
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(folder).named_tokens == tokenizer.named_tokens
    write(tmp_path, eos_token=SPECIAL, added_tokens_decoder={})
    assert load_tokenizer(folder).named_tokens == {"eos_token": SPECIAL}


def test_tokens_have_names_of_their_own_too(tmp_path: Path) -> None:
    settings = {"image_token": SPECIAL, "extra_special_tokens": {"end_token": "<|end|>"}, "add_bos_token": False}
    assert load_tokenizer(write(tmp_path, **settings)).named_tokens == {"image_token": SPECIAL, "end_token": "<|end|>"}


def test_tokens_of_added_tokens_json_are_added(tmp_path: Path) -> None:
    next_id = train().get_vocab_size()
    folder = write(tmp_path)
    (folder / "added_tokens.json").write_text(json.dumps({"<|b|>": next_id + 1, "<|a|>": next_id, SPECIAL: 0}))
    assert load_tokenizer(folder).encode("<|b|><|a|>") == [next_id + 1, next_id]
    for content, words in (
        (
            {"<|b|>": next_id + 1},
            rf"should have id {next_id + 1}, but tokenizer\.json lacks it, and its next free id is {next_id};",
        ),
        ({"the": 0}, r"added_tokens\.json: token 'the' should have id 0, but tokenizer\.json gives it \d+; the two"),
        ({"<|b|>": "7"}, "'<|b|>' is '7': it must be the id of a token".replace("|", r"\|")),
    ):
        (folder / "added_tokens.json").write_text(json.dumps(content))
        with pytest.raises(TokenizerError, match=words):
            load_tokenizer(folder)


@rows("name", "bos_token", "eos_token")
def test_an_end_of_the_plain_vocabulary_is_one_token(tmp_path: Path, name: str) -> None:
    the = train().token_to_id("the")
    assert the is not None
    tokenizer = load_tokenizer(write(tmp_path, **{name: "the"}))
    assert tokenizer.special_tokens["the"] == the
    assert the in tokenizer.encode("xthex")
    assert "nowhere" not in load_tokenizer(write(tmp_path, **{name: "nowhere"})).special_tokens


@rows("settings", {"pad_token": "the"}, {"additional_special_tokens": [{"content": "the"}]})
def test_another_special_token_of_the_plain_vocabulary_stays_a_word(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Answers show no special tokens: with "!" for padding, they lost it."""
    tokenizer = load_tokenizer(write(tmp_path, **settings))
    assert "the" not in tokenizer.special_tokens
    assert tokenizer.encode("xthex") == load_tokenizer(write(tmp_path)).encode("xthex")


def test_a_null_in_special_tokens_map_names_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path, bos_token=SPECIAL)
    (folder / "special_tokens_map.json").write_text('{"bos_token": null, "pad_token": "<|end|>"}')
    assert load_tokenizer(folder).named_tokens == {"bos_token": SPECIAL, "pad_token": "<|end|>"}


def test_files_whose_ids_disagree_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, added_tokens_decoder={"7": {"content": SPECIAL, "special": True}})
    with pytest.raises(TokenizerError, match=r"token '<\|start\|>' should have id 7, but tokenizer.json gives it 0"):
        load_tokenizer(folder)


def test_missing_damaged_and_foreign_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot be read"):
        load_tokenizer(tmp_path)
    for decoder in (None, decoders.WordPiece(), decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])):
        rust = train()
        rust.decoder = decoder
        with pytest.raises(TokenizerError, match="only byte-level BPE tokenizers are supported"):
            load_tokenizer(write(tmp_path, rust))


def test_damaged_settings_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    for text, words in (("{", "cannot be read as JSON"), ("[]", "must hold a JSON object")):
        (folder / "tokenizer_config.json").write_text(text)
        with pytest.raises(TokenizerError, match=rf"tokenizer_config\.json: {words}"):
            load_tokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(folder).encode("fox")


def test_a_byte_level_decoder_inside_a_sequence_is_found(tmp_path: Path) -> None:
    rust = train()
    rust.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert load_tokenizer(write(tmp_path, rust)).decode([0]) == SPECIAL
