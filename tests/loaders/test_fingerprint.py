"""Fingerprints of model folders: copies have the same, other revisions do not, and files are not read whole."""

import json
import shutil
import time

import pytest
import torch
from safetensors.torch import save_file

from loaders.fingerprint import fingerprint

CONFIG = {"hidden_size": 64, "_name_or_path": "a/b", "transformers_version": "4.57"}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a": torch.randn(64, 64), "b": torch.randn(8)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def copy(model, tmp_path):
    return shutil.copytree(model, tmp_path / "elsewhere" / "copy")


def differing(one, other):
    ours, theirs = fingerprint(one), fingerprint(other)
    return [name for name in ours | theirs if ours.get(name) != theirs.get(name)]


def test_a_copy_elsewhere_is_the_same(model, copy):
    (copy / "config.json").write_text(json.dumps(CONFIG | {"_name_or_path": "c/d"}, indent=2))
    (copy / "README.md").write_text("mine")
    assert differing(model, copy) == []
    assert set(fingerprint(model)) == {"config.json", "model.safetensors"}


def test_another_revision_of_the_same_shape_is_noticed(model, copy):
    save_file({"a": torch.randn(64, 64), "b": torch.randn(8)}, copy / "model.safetensors")
    assert differing(model, copy) == ["model.safetensors"]
    assert fingerprint(model, reads_weights=False) == fingerprint(copy, reads_weights=False)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 65})), "config.json"),
        (lambda folder: (folder / "hf_quant_config.json").write_text("{}"), "hf_quant_config.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        (lambda folder: (folder / "generation_config.json").write_text("{}"), "generation_config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: save_file({"c": torch.ones(2)}, folder / "more.safetensors"), "more.safetensors"),
    ],
)
def test_what_else_differs_is_named(model, copy, change, name):
    change(copy)
    assert differing(model, copy) == [name]


def test_files_that_the_index_leaves_out_do_not_count(model, copy):
    for folder in (model, copy):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    save_file({"a": torch.ones(2)}, copy / "of_another_format.safetensors")
    assert differing(model, copy) == []


def test_large_files_take_no_time(model):
    header = json.dumps({f"layers.{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(600)})
    for i in range(160):
        with (model / f"model-{i:05}.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header.encode())
            file.truncate(4 * 2**30)  # a hole
    start_s = time.process_time()
    assert len(fingerprint(model)) == 162
    assert time.process_time() - start_s < 0.5
