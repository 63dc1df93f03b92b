"""Layer numbers whatever the prefix, the skip rule for prediction layers, and sources under other names."""

import logging
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from loaders.errors import CheckpointError
from loaders.naming import RenamedSource, layer_index, prediction_names, skip_prediction_layers, with_model_prefix
from tests.loaders.expert_files import random_bf16, save
from tests.tables import rows


@rows(
    "name, index",
    ("model.layers.61.enorm.weight", 61),
    ("layers.61.enorm.weight", 61),
    ("language_model.model.layers.3.mlp.experts.7.up_proj.weight", 3),
    ("model.norm.weight", None),
    ("model.sublayers.4.weight", None),
    ("lm_head.weight", None),
)
def test_layer_numbers(name: str, index: int | None) -> None:
    assert layer_index(name) == index


@rows("prefix", "", "model.", "language_model.model.")
@rows("part", "eh_proj", "enorm", "hnorm", "shared_head.norm")
def test_one_tensor_tells_a_prediction_layer_of_deepseek(prefix: str, part: str) -> None:
    own = [f"{prefix}layers.60.mlp.gate.weight", f"{prefix}embed_tokens.weight", f"{prefix}layers.2.mtp_like.weight"]
    extra = [f"{prefix}layers.61.{part}.weight", f"{prefix}layers.61.mlp.gate.weight", f"{prefix}mtp.0.norm.weight"]
    assert prediction_names(own + extra) == extra


@rows("part", "eh_proj", "self_attn.q_proj")
@rows("prefix", "mtp.", "model.mtp.")
def test_prediction_layers_by_another_name_count_from_zero_again(prefix: str, part: str, tmp_path: Path) -> None:
    """They are none of the model's own layers, whatever their number."""
    own = layers("model.", range(2))
    extra = {f"{prefix}layers.{number}.{part}.weight": random_bf16(2, 4) for number in (0, 61)}
    assert prediction_names([*own, *extra]) == list(extra)
    source = save(tmp_path, own | extra)
    skip_prediction_layers(source, 2)
    with pytest.raises(CheckpointError, match="2 tensors belong"):
        source.finish()


def layers(prefix: str, numbers: Iterable[int]) -> dict[str, torch.Tensor]:
    return {f"{prefix}layers.{n}.input_layernorm.weight": random_bf16(500, seed=n) for n in numbers}


@rows("prefix", "model.", "")
def test_prediction_layers_are_skipped_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prefix: str
) -> None:
    extra = {f"{prefix}layers.{n}.eh_proj.weight": random_bf16(2, 4) for n in (3, 4)}
    source = save(tmp_path, layers(prefix, range(5)) | extra | {"lm_head.weight": random_bf16(2, 2)})
    with caplog.at_level(logging.INFO, "loaders"):
        skip_prediction_layers(source, 3)
    assert [record.message.split(":")[0] for record in caplog.records] == ["skipped 4 tensors (0.0 MB)"]
    with pytest.raises(CheckpointError, match="4 tensors belong"):
        source.finish()


@rows(
    "num_hidden_layers, words",
    (3, "there is a layer 4, but num_hidden_layers in config.json is 3: .* set it to 5"),
    (4, "there is a layer 4, but num_hidden_layers in config.json is 4: .* set it to 5"),
    (6, "layer 5 is for multi-token prediction .*num_hidden_layers in config.json is 6: set it to 5"),
)
@rows("prefix", "model.", "")
def test_a_wrong_number_of_layers_is_refused(tmp_path: Path, prefix: str, num_hidden_layers: int, words: str) -> None:
    """With num_hidden_layers too small, real layers were skipped as prediction layers."""
    source = save(tmp_path, layers(prefix, range(6)) | {f"{prefix}layers.5.eh_proj.weight": random_bf16(2, 4)})
    with pytest.raises(CheckpointError, match=words):
        skip_prediction_layers(source, num_hidden_layers)


def test_the_model_prefix_is_added_where_it_is_missing() -> None:
    for bare in ("layers.0.self_attn.sinks", "embed_tokens.weight", "norm.weight"):
        assert with_model_prefix(bare) == f"model.{bare}"
        assert with_model_prefix(f"model.{bare}") == f"model.{bare}"
    assert with_model_prefix("lm_head.weight") == "lm_head.weight"


def test_a_renamed_source_reads_by_the_new_name_and_reports_both(tmp_path: Path) -> None:
    head = random_bf16(3, 2)
    renamed = RenamedSource(
        save(tmp_path, {"head.weight": head, "kept": torch.ones(1)}), lambda name: name.replace("head", "lm_head")
    )
    assert sorted(renamed.names()) == ["kept", "lm_head.weight"]
    assert torch.equal(renamed.tensor("lm_head.weight"), head)
    assert "head.weight" not in renamed
    with pytest.raises(CheckpointError, match=r"tensor 'head\.weight' \(read as 'lm_head\.weight'\): expected shape"):
        renamed.expect("lm_head.weight", shape=(1,))
    with pytest.raises(CheckpointError, match=r"1 tensors belong to no part of the model: .*'kept'"):
        renamed.finish()


def test_two_tensors_may_not_end_up_with_one_name(tmp_path: Path) -> None:
    source = save(tmp_path, {"layers.0.a": torch.ones(1), "model.layers.0.a": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"would both be 'model\.layers\.0\.a'"):
        RenamedSource(source, with_model_prefix)
