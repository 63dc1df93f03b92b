"""DeepSeek-V3 gives transformers' logits, from FP8 blocks with an MTP layer, from NVFP4, and from plain weights."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from loaders.errors import CheckpointError
from model.config import ModelSettings
from model.registry import build_model
from tests.model.checkpoints import make_deepseek, pack_fp8, pack_nvfp4, state_by_file_name, write
from tests.model.paged import PagedCache, run
from tests.model.parity import check_all_ways, check_close, packed_pair, prompt
from tests.tables import rows

FP8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
NVFP4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}


def test_fp8_blocks_with_an_extra_prediction_layer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {
        "model.layers.3.eh_proj.weight": torch.randn(160, 320),
        "model.layers.3.input_layernorm.weight": torch.ones(160),
        "model.layers.3.shared_head.norm.weight": torch.ones(160),
    }
    with caplog.at_level(logging.INFO):
        model, reference = packed_pair(make_deepseek(), tmp_path, pack_fp8, FP8, extra)
    skipped = [record.getMessage() for record in caplog.records if "prediction" in record.getMessage()]
    assert len(skipped) == 1
    assert "3 tensors" in skipped[0]
    assert model.eos_token_ids == (1, 2)
    assert [layer.description for layer in model.moe_layers] == [
        "layer 1: torch / none / fp8_block",
        "layer 2: torch / none / fp8_block",
    ]
    check_all_ways(model, reference, 100)


def test_nvfp4(tmp_path: Path) -> None:
    model, reference = packed_pair(make_deepseek(1), tmp_path, pack_nvfp4, NVFP4)
    assert model.moe_layers[0].description.endswith("nvfp4")
    check_all_ways(model, reference, 80)


def test_plain_without_query_latent_or_normalised_weights(tmp_path: Path) -> None:
    reference = make_deepseek(2, q_lora_rank=None, norm_topk_prob=False, n_shared_experts=2, first_k_dense_replace=2)
    model, reference = packed_pair(reference, tmp_path, None)
    assert len(model.moe_layers) == 1
    check_all_ways(model, reference, 80)


@rows("changes", {}, {"q_lora_rank": None})
def test_latent_norms_have_an_epsilon_of_their_own(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Section G: rms_norm_eps is for the norms of the hidden states; the latents' take 1e-6."""
    model, reference = packed_pair(make_deepseek(4, rms_norm_eps=0.1, **changes), tmp_path, None)
    ids = prompt(20, 4)
    cache = PagedCache(model.kv_specs)
    got = run(model, cache.batch({"a": ids}, all_logits=True), cache.layers)
    check_close(got, reference(torch.tensor([ids])).logits[0])


def test_positions_far_beyond_the_original_context(tmp_path: Path) -> None:
    model, reference = packed_pair(make_deepseek(3, max_position_embeddings=21000), tmp_path, None)
    positions = [1, 127, 4096, 20000]
    ids = prompt(len(positions), 2)
    want = reference(torch.tensor([ids]), position_ids=torch.tensor([positions])).logits[0]
    cache = PagedCache(model.kv_specs)
    batch = cache.batch({"a": ids}, all_logits=True)
    batch.positions_T.copy_(torch.tensor(positions))
    check_close(run(model, batch, cache.layers), want)


def test_names_without_the_model_prefix(tmp_path: Path) -> None:
    reference = make_deepseek()
    tensors = state_by_file_name(reference, tmp_path)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    write(tmp_path, bare | {"layers.3.enorm.weight": torch.ones(160)})
    model = build_model(tmp_path, ModelSettings())
    ids = prompt(20, 4)
    cache = PagedCache(model.kv_specs)
    got = run(model, cache.batch({"a": ids}, all_logits=True), cache.layers)
    check_close(got, reference(torch.tensor([ids])).logits[0])


@rows(
    "name", "model.norm.bias", "model.layers.0.input_layernorm.bias", "model.layers.1.mlp.gate.bias", "lm_head2.weight"
)
def test_a_tensor_of_no_part_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Section G: left-over tensors are an error, those that end in .bias too."""
    tensors = state_by_file_name(make_deepseek(), tmp_path)
    write(tmp_path, tensors | {name: torch.zeros(160)})
    with pytest.raises(CheckpointError, match=rf"1 tensors belong to no part of the model: .*'{re.escape(name)}'"):
        build_model(tmp_path, ModelSettings())


def test_tensors_of_old_exports_and_of_a_quantized_cache_are_skipped(tmp_path: Path) -> None:
    tensors = state_by_file_name(make_deepseek(), tmp_path)
    prefix = "model.layers.1.self_attn"
    unused = (f"{prefix}.k_proj.k_scale", f"{prefix}.v_proj.v_scale", f"{prefix}.rotary_emb.inv_freq")
    write(tmp_path, tensors | {name: torch.zeros(1) for name in unused})
    build_model(tmp_path, ModelSettings())


def test_latent_cache_holds_one_vector_per_token(tmp_path: Path) -> None:
    model, _ = packed_pair(make_deepseek(), tmp_path, None)
    spec = model.kv_specs[0]
    assert (spec.num_heads, spec.key_dim, spec.value_dim) == (1, 32 + 16, 0)
