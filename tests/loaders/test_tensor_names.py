"""Layer numbers whatever the prefix, the skip rule for prediction layers, and sources under other names."""

import logging
from pathlib import Path

import pytest
import torch

from loaders.errors import CheckpointError
from loaders.naming import RenamedSource, is_prediction_layer, layer_index, skip_prediction_layers, with_model_prefix
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


@rows(
    "name, expected",
    ("model.layers.60.mlp.gate.weight", False),
    ("model.layers.61.eh_proj.weight", True),
    ("layers.61.shared_head.norm.weight", True),
    ("mtp.0.attn.wq_a.weight", True),
    ("model.mtp.0.norm.weight", True),
    ("model.embed_tokens.weight", False),
    ("model.layers.2.mtp_like.weight", False),
)
def test_prediction_layers_of_deepseek(name: str, expected: bool) -> None:
    assert is_prediction_layer(name, 61) is expected


@rows("prefix", "model.", "")
def test_a_config_with_fewer_layers_skips_the_rest_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prefix: str
) -> None:
    """B28: three layers by the config, five in the files, with and without the prefix."""
    tensors = {f"{prefix}layers.{n}.input_layernorm.weight": random_bf16(500, seed=n) for n in range(5)}
    source = save(tmp_path, tensors | {"lm_head.weight": random_bf16(2, 2)})
    with caplog.at_level(logging.INFO, "loaders"):
        skip_prediction_layers(source, 3)
    assert [record.message.split(":")[0] for record in caplog.records] == ["skipped 2 tensors (0.0 MB)"]
    with pytest.raises(CheckpointError, match="4 tensors belong"):
        source.finish()


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
