"""Opening checkpoints: what is accepted, what is refused with which words, and the record of used tensors."""

import json
import logging
import re
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loaders.checkpoint import Checkpoint
from loaders.errors import CheckpointError, LoadError
from tests.loaders.expert_files import random_bf16, save
from tests.tables import rows

A, B = random_bf16(4, 6, seed=1), random_bf16(3, seed=2)


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def sharded(folder: Path) -> Path:
    save_file({"a": A}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": B}, folder / "model-00002-of-00002.safetensors")
    write_index(folder, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    return folder


def raw_file(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_single_file_index_and_plain_folder_give_the_same_tensors(tmp_path: Path) -> None:
    (tmp_path / "sharded").mkdir()
    folder = sharded(tmp_path / "sharded")
    single = save(tmp_path / "single", {"a": A, "b": B})
    without_index = tmp_path / "loose"
    save(without_index, {"a": A}, "one.safetensors")
    save(without_index, {"b": B}, "two.safetensors")
    sources = [single, Checkpoint.open(folder), Checkpoint.open(without_index)]
    sources.append(Checkpoint.open(tmp_path / "single" / "model.safetensors"))
    sources.append(Checkpoint.open(folder / "model.safetensors.index.json"))
    for source in sources:
        assert sorted(source.names()) == ["a", "b"]
        assert torch.equal(source.tensor("a"), A)
        assert torch.equal(source.tensor("b"), B)
        source.finish()


@rows(
    "values",
    torch.tensor([[1.5, -448.0]]).to(torch.float8_e4m3fn),
    torch.tensor([[0.5, 4.0]]).to(torch.float8_e8m0fnu),
    torch.tensor([[-1, 127]], dtype=torch.int8),
    torch.tensor([[255, 0]], dtype=torch.uint8),
    torch.tensor([[1.0, 2.5]], dtype=torch.bfloat16),
    torch.tensor([[1.0, 2.5]], dtype=torch.float32),
    torch.tensor([[7, -3]], dtype=torch.int64),
    torch.zeros((0, 3)),
    torch.tensor(2.0),
)
def test_every_dtype_is_read_exactly(tmp_path: Path, values: torch.Tensor) -> None:
    found = save(tmp_path, {"t": values}).tensor("t")
    assert found.dtype == values.dtype
    assert found.shape == values.shape
    assert torch.equal(found.reshape(-1).view(torch.uint8), values.reshape(-1).view(torch.uint8))


def test_packed_fp4_is_handed_out_as_bytes(tmp_path: Path) -> None:
    raw_file(tmp_path / "m.safetensors", {"w": entry("F4", [2, 4], 0, 4)}, b"\x10\x32\x54\x76")
    source = Checkpoint.open(tmp_path)
    assert source.meta("w").shape == (2, 2)
    assert source.tensor("w").tolist() == [[0x10, 0x32], [0x54, 0x76]]


@rows("dtype, begin", ("F32", 1), ("F32", 2), ("F32", 3), ("BF16", 1), ("F32", 4), ("BF16", 2))
def test_tensors_at_every_offset_are_read(tmp_path: Path, dtype: str, begin: int) -> None:
    """torch refuses a view whose first byte is no multiple of the element's size; the header may ask for one."""
    data = struct.pack("<f", 2.5) if dtype == "F32" else b"\x20\x40"
    header = {"bytes": entry("U8", [begin], 0, begin), "word": entry(dtype, [1], begin, begin + len(data))}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data begins at a multiple of 8
    raw_file(tmp_path / "m.safetensors", text, b"\x07" * begin + data)
    assert Checkpoint.open(tmp_path).tensor("word").tolist() == [2.5]


def test_opening_reads_headers_only(tmp_path: Path) -> None:
    """A sparse file of 64 GB opens and gives a slice from its end: nothing in between can have been read."""
    rows = 64 * 1024
    header = json.dumps({"w": entry("U8", [rows, 1024 * 1024], 0, rows * 1024 * 1024)}).encode()
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + rows * 1024 * 1024)
    assert Checkpoint.open(tmp_path).view("w")[-1].sum() == 0


def test_returned_tensors_are_copies(tmp_path: Path) -> None:
    source = save(tmp_path, {"a": A})
    source.tensor("a").zero_()
    assert torch.equal(source.tensor("a"), A)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tensor 'c' is missing"):
        save(tmp_path, {"a": A}).tensor("c")


def test_wrong_shape_and_dtype_name_expected_and_found(tmp_path: Path) -> None:
    source = save(tmp_path, {"a": A})
    assert source.expect("a", shape=(4, 6), dtypes=[torch.bfloat16]).name == "a"
    with pytest.raises(CheckpointError, match=r"tensor 'a': expected shape \[6, 4\], found \[4, 6\]"):
        source.expect("a", shape=(6, 4))
    with pytest.raises(CheckpointError, match="tensor 'a': expected dtype float32 or uint8, found bfloat16"):
        source.expect("a", dtypes=[torch.float32, torch.uint8])


def test_finish_lists_tensors_nobody_used(tmp_path: Path) -> None:
    source = save(tmp_path, {f"t{i:02}": B.clone() for i in range(12)})
    source.tensor("t00")
    source.mark_used(["t01"])
    with pytest.raises(CheckpointError, match=r"10 tensors belong to no part of the model: .*'t02'.*and 2 more"):
        source.finish()


def test_skip_logs_count_and_size_once_and_reads_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = save(
        tmp_path, {"a": torch.zeros(500_000, dtype=torch.uint8), "b": torch.zeros(500_000, dtype=torch.uint8)}
    )
    with caplog.at_level(logging.INFO, "loaders"):
        source.skip(["a", "b"], "not needed")
        source.skip([], "nothing to say")
    assert [record.message for record in caplog.records] == ["skipped 2 tensors (1.0 MB): not needed"]
    source.finish()


@rows("name", "b", "x.bias", "x.weight_scale", "x.rotary_emb.inv_freq", "x.num_batches_tracked")
def test_a_tensor_that_nobody_read_is_an_error_whatever_its_name(tmp_path: Path, name: str) -> None:
    """Section G: left-over tensors that end in .bias must not pass."""
    source = save(tmp_path, {"a": A, name: B})
    source.tensor("a")
    with pytest.raises(
        CheckpointError, match=rf"1 tensors belong to no part of the model: .*tensor '{re.escape(name)}'"
    ):
        source.finish()


def test_errors_are_load_errors_and_value_errors() -> None:
    assert issubclass(CheckpointError, LoadError)
    assert issubclass(LoadError, ValueError)


def test_a_truncated_shard_names_file_and_tensor(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors: tensor 'b': the file is truncated"):
        Checkpoint.open(folder)


@rows("size", 0, 5, 8, 20)
def test_a_file_cut_in_its_header_is_refused(tmp_path: Path, size: int) -> None:
    save(tmp_path, {"a": A})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or no safetensors file"):
        Checkpoint.open(tmp_path)


def test_a_header_longer_than_allowed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")
    with pytest.raises(CheckpointError, match="header should take 1099511627776 bytes"):
        Checkpoint.open(tmp_path)


@rows(
    "header, data, words",
    (b"{not json", b"", "not valid JSON"),
    (b"\xff\xfe{}", b"", "not valid JSON"),
    (b"[" * 100_000 + b"]" * 100_000, b"", "not valid JSON .it is nested too deeply"),
    (b'{"a": ' + b"1" * 5000 + b"}", b"", "not valid JSON .*digits"),
    (b"[]", b"", "not a JSON object"),
    ({"w": {"dtype": "F32"}}, b"", "tensor 'w': damaged header entry"),
    ({"w": entry("F32", [2], 0, 4)}, b"\0" * 4, "tensor 'w': F32 .2. takes 8 bytes, but the header gives it 4"),
    ({"w": entry("F32", [1], -4, 0)}, b"", "tensor 'w': damaged header entry"),
    ({"w": entry("F32", [-1, -1], 0, 4)}, b"\0" * 4, "tensor 'w': damaged header entry"),
    ({"w": entry("F32", [1.5], 0, 4)}, b"\0" * 4, "tensor 'w': damaged header entry"),
    ({"w": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}, b"\0" * 4, "tensor 'w': damaged header"),
    ({"w": entry(["F32"], [1], 0, 4)}, b"\0" * 4, "tensor 'w': dtype .* is not supported"),
    ({"w": entry("F6_E2M3", [4], 0, 3)}, b"\0" * 3, "tensor 'w': dtype F6_E2M3 is not supported"),
    ({"w": entry("F4", [3], 0, 2)}, b"\0" * 2, "tensor 'w': FP4 needs an even last dimension"),
    ({"w": entry("U8", [1], 0, 1)}, b"\0\0\0", "2 bytes follow the last tensor"),
    (b'{"w": 1, "w": 2}', b"", "tensor 'w' appears twice"),
)
def test_damaged_headers_are_refused(tmp_path: Path, header: object, data: bytes, words: str) -> None:
    raw_file(tmp_path / "m.safetensors", header, data)
    with pytest.raises(CheckpointError, match=rf"m\.safetensors: .*{words}"):
        Checkpoint.open(tmp_path)


@rows(
    "header, words",
    (
        {"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 0, 8)},
        "tensor 'b': its data begins 8 bytes before tensor 'a' ends",
    ),
    (
        {"a": entry("F32", [2], 0, 8), "b": entry("U8", [8], 4, 12)},
        "tensor 'b': its data begins 4 bytes before tensor 'a' ends",
    ),
    (
        {"outer": entry("U8", [12], 0, 12), "inner": entry("U8", [4], 4, 8)},
        "tensor 'inner': its data begins 8 bytes before tensor 'outer' ends",
    ),
    (
        {"b": entry("U8", [4], 8, 12), "a": entry("U8", [4], 0, 4)},
        "tensor 'b': 4 bytes between tensor 'a' and its data belong to no tensor",
    ),
    ({"a": entry("U8", [8], 4, 12)}, "tensor 'a': 4 bytes between the header and its data belong to no tensor"),
)
def test_g43_every_byte_belongs_to_exactly_one_tensor(tmp_path: Path, header: object, words: str) -> None:
    """Field report G43: a shared byte range gives one tensor the contents of another. The format forbids holes, too."""
    raw_file(tmp_path / "m.safetensors", header, bytes(12))
    with pytest.raises(CheckpointError, match=rf"m\.safetensors: {words}"):
        Checkpoint.open(tmp_path)


def test_order_in_the_header_and_empty_tensors_do_not_matter(tmp_path: Path) -> None:
    header = {
        "last": entry("U8", [4], 8, 12),
        "empty": entry("F32", [0, 3], 8, 8),
        "first": entry("F32", [2], 0, 8),
        "at_the_end": entry("U8", [0], 12, 12),
    }
    raw_file(tmp_path / "m.safetensors", header, struct.pack("<ff", 1.5, 2.5) + b"\1\2\3\4")
    source = Checkpoint.open(tmp_path)
    assert source.tensor("first").tolist() == [1.5, 2.5]
    assert source.tensor("last").tolist() == [1, 2, 3, 4]
    assert source.tensor("empty").shape == (0, 3)


def test_a_git_lfs_pointer_says_what_to_run(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        Checkpoint.open(tmp_path)


def test_an_index_naming_a_tensor_the_file_lacks_is_stale(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    write_index(folder, {"a": "model-00001-of-00002.safetensors", "gone": "model-00001-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=r"index\.json is stale: tensor 'gone' is not in .*00001-of"):
        Checkpoint.open(folder)


def test_an_index_that_leaves_tensors_out_is_completed_by_the_headers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """ModelOpt's script for DeepSeek writes NVFP4 scales into the files and not into the index."""
    caplog.set_level(logging.INFO, logger="loaders")
    save(tmp_path, {"a": A, "b": B}, "x.safetensors")
    write_index(tmp_path, {"a": "x.safetensors"})
    source = Checkpoint.open(tmp_path)
    assert torch.equal(source.tensor("b"), B)
    assert "leaves out 1 tensors of its files" in caplog.text
    with pytest.raises(CheckpointError, match=r"belong to no part of the model: .*'a'"):
        source.finish()


def test_a_file_the_index_names_but_that_is_missing(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors: missing, .* tensor 'b'"):
        Checkpoint.open(folder)


def test_an_index_with_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    """It was an OSError 36."""
    write_index(tmp_path, {"a": "x" * 300})
    with pytest.raises(CheckpointError, match=r"the file that it names for tensor 'a' cannot be opened: .*too long"):
        Checkpoint.open(tmp_path)


@rows("listed", "./model.safetensors", ".//model.safetensors", "model.safetensors")
def test_an_index_of_a_single_file_may_spell_its_name_in_several_ways(tmp_path: Path, listed: str) -> None:
    """The error said to remove one of two files that were meant both, or that a tensor was in two files."""
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    write_index(tmp_path, {"a": listed, "b": "./model.safetensors"})
    assert set(Checkpoint.open(tmp_path).names()) == {"a", "b"}


@rows("outside", "./../x.safetensors", "../x.safetensors", "/etc/x.safetensors")
def test_an_index_may_not_point_outside_its_folder(tmp_path: Path, outside: str) -> None:
    write_index(tmp_path, {"a": outside})
    with pytest.raises(CheckpointError, match="points outside the folder"):
        Checkpoint.open(tmp_path)


@rows("text", "{", "[]", "{}", '{"weight_map": []}')
def test_a_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        Checkpoint.open(tmp_path)


@rows("file", None, "", ".", 5, ["x.safetensors"])
def test_an_index_entry_that_names_no_file_is_wrong_itself(tmp_path: Path, file: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    words = rf"index\.json: the entry of tensor 'a' is {re.escape(repr(file))}, which names no file"
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(tmp_path)


def test_two_indexes_or_an_index_beside_a_single_file_are_ambiguous(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    save_file({"a": A}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"both model\.safetensors and model\.safetensors\.index\.json"):
        Checkpoint.open(folder)
    (folder / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="more than one index"):
        Checkpoint.open(folder)


def test_one_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "one.safetensors")
    save_file({"a": A}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'a' is in two files: .*one\.safetensors and .*two\.safetensors"):
        Checkpoint.open(tmp_path)


def test_folders_without_a_checkpoint_say_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="PyTorch pickles but no safetensors; convert"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match=r"neither a folder nor a \.safetensors file"):
        Checkpoint.open(tmp_path / "pytorch_model.bin")


def test_the_original_layout_of_gpt_oss_is_recognised(tmp_path: Path) -> None:
    tensors = {"block.0.mlp.mlp1_weight.blocks": torch.zeros(1, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match="OpenAI's original/ layout"):
        save(tmp_path / "original", tensors)
    with pytest.raises(CheckpointError, match="only the original/ layout is here"):
        Checkpoint.open(tmp_path)


EXPERTS = "model.layers.0.mlp.experts"


@rows(
    "name, words",
    ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "this is a LoRA adapter; merge it"),
    (f"{EXPERTS}.gate_up_projs.0.weight", "as Unsloth trains them; export with save_pretrained_merged"),
    (f"{EXPERTS}.0.gate_up_proj.weight", "as Quark writes them; take openai's upload"),
    ("module.model.norm.weight", "saved with the wrapper"),
    ("_orig_mod.model.norm.weight", "saved with the wrapper"),
    ("language_model.model.norm.weight", "the language model inside another model"),
    ("model.language_model.norm.weight", "the language model inside another model"),
)
def test_a_layout_that_is_known_but_not_read_is_named(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        save(tmp_path, {"lm_head.weight": A, name: A})
    assert f"tensor '{name}'" in str(caught.value)
