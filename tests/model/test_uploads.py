"""Uploads that contradict themselves: the tensors decide, and what they cannot decide is refused by name."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from loaders.errors import CheckpointError
from model.config import ModelSettings, UnsupportedModelError
from model.embedding import OutputHead
from model.registry import build_model
from tests.model.checkpoints import make_deepseek, make_gpt_oss, pack_nvfp4, set_weights, state_by_file_name, write
from tests.model.paged import PagedCache, run
from tests.model.parity import check_close
from tests.tables import rows

FP8_SECTION = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NVFP4_FILE = '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}'
PROMPT = torch.arange(1, 13)


def logits_of(folder: Path) -> torch.Tensor:
    model = build_model(folder, ModelSettings())
    cache = PagedCache(model.kv_specs)
    return run(model, cache.batch({"a": PROMPT.tolist()}), cache.layers)


def test_g40_nvfp4_tensors_beside_the_ancestors_fp8_section(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors, _ = pack_nvfp4(state_by_file_name(make_deepseek(), tmp_path))
    write(tmp_path, tensors)
    expected = logits_of(tmp_path)
    write(tmp_path, tensors, {"quantization_config": FP8_SECTION})
    (tmp_path / "hf_quant_config.json").write_text(NVFP4_FILE)
    with caplog.at_level(logging.WARNING):
        found = logits_of(tmp_path)
    assert torch.equal(found, expected)
    assert [record.message for record in caplog.records if "the tensors decide" in record.message]


def test_g40_without_hf_quant_config_the_tensors_decide_as_well(tmp_path: Path) -> None:
    tensors, _ = pack_nvfp4(state_by_file_name(make_deepseek(), tmp_path))
    write(tmp_path, tensors)
    expected = logits_of(tmp_path)
    write(tmp_path, tensors, {"quantization_config": FP8_SECTION})
    assert torch.equal(logits_of(tmp_path), expected)


UNNEEDED = (
    "k_proj.k_scale",
    "v_proj.output_scale",
    "attn.q_scale",
    "kv_scale",
    "k_bmm_quantizer._amax",
    "rotary_emb.inv_freq",
)


@rows("make", make_gpt_oss, make_deepseek)
def test_scales_of_a_quantized_cache_and_old_rope_tables_are_left_out(tmp_path: Path, make: Any) -> None:
    tensors = state_by_file_name(make(), tmp_path)
    more = {f"model.layers.1.self_attn.{name}": torch.ones(1) for name in UNNEEDED}
    write(tmp_path, tensors | more)
    build_model(tmp_path, ModelSettings(selfcheck="off"))


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def tied(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a GPT-OSS whose config.json ties the embedding; the stored head is another matrix."""
    return state_by_file_name(make_gpt_oss(tie_word_embeddings=False), tmp_path)


def write_tied(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    write(folder, tensors, {"tie_word_embeddings": True})


def test_g41_a_stored_head_that_differs_is_used_as_transformers_does(
    tmp_path: Path, tied: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    write_tied(tmp_path, tied)
    found = logits_of(tmp_path)
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "tensor 'lm_head.weight': differs from the embedding" in warning
    assert "the stored head is used" in warning
    reference = set_weights(make_gpt_oss(tie_word_embeddings=True), tied, tmp_path)
    assert not torch.equal(reference.lm_head.weight, reference.model.embed_tokens.weight)
    check_close(found, reference(PROMPT[None]).logits[0, -1:])


@pytest.fixture
def head_weights(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The matrices that output heads are made of."""
    seen: list[torch.Tensor] = []

    def make_head(weight_VH: torch.Tensor, **options: Any) -> OutputHead:
        seen.append(weight_VH)
        return OutputHead(weight_VH, **options)

    monkeypatch.setattr("model.load.OutputHead", make_head)
    return seen


def test_g41_a_stored_copy_of_the_embedding_is_not_kept_twice(
    tmp_path: Path, tied: dict[str, torch.Tensor], head_weights: list[torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    write_tied(tmp_path, {**tied, HEAD: tied[EMBEDDING].clone()})
    model = build_model(tmp_path, ModelSettings())
    assert head_weights[0] is model.embedding.weight
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_g41_a_tied_matrix_may_be_stored_under_either_name(
    tmp_path: Path, tied: dict[str, torch.Tensor], head_weights: list[torch.Tensor]
) -> None:
    """safetensors writes only one of two names that share memory, and that is `lm_head.weight`."""
    rest = {name: tensor for name, tensor in tied.items() if name not in (EMBEDDING, HEAD)}
    for stored in (EMBEDDING, HEAD):
        head_weights.clear()
        write_tied(tmp_path, rest | {stored: tied[EMBEDDING]})
        model = build_model(tmp_path, ModelSettings())
        assert torch.equal(model.embedding.weight, tied[EMBEDDING]), stored
        assert head_weights[0] is model.embedding.weight, stored


def test_g41_a_stored_head_in_another_dtype_is_used(
    tmp_path: Path, tied: dict[str, torch.Tensor], head_weights: list[torch.Tensor]
) -> None:
    write_tied(tmp_path, {**tied, HEAD: tied[EMBEDDING].bfloat16()})
    model = build_model(tmp_path, ModelSettings())
    assert torch.equal(head_weights[0], tied[EMBEDDING].bfloat16().float())
    assert torch.equal(model.embedding.weight, tied[EMBEDDING])


def test_g41_a_stored_head_of_another_size_is_refused_by_name(tmp_path: Path, tied: dict[str, torch.Tensor]) -> None:
    write_tied(tmp_path, {**tied, HEAD: tied[HEAD][:-1]})
    with pytest.raises(UnsupportedModelError, match=r"tensor 'lm_head\.weight': its shape is \[95, 64\]"):
        build_model(tmp_path, ModelSettings())


def test_g41_an_untied_model_needs_its_head(tmp_path: Path, tied: dict[str, torch.Tensor]) -> None:
    write(tmp_path, {name: tensor for name, tensor in tied.items() if name != HEAD})
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head\.weight' is missing"):
        build_model(tmp_path, ModelSettings())
