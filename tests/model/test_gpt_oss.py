"""GPT-OSS gives transformers' logits, from the published MXFP4 form and from a dense re-upload."""

import dataclasses
from pathlib import Path

import pytest
import torch

from model.config import ModelSettings
from model.moe_layer import MoeLayer
from model.registry import build_model
from tests.model.checkpoints import make_gpt_oss, pack_mxfp4, state_by_file_name, write
from tests.model.paged import PagedCache, run
from tests.model.parity import check_all_ways, check_close, packed_pair, prompt
from tests.tables import rows

ASSETS = Path(__file__).parents[2] / "assets" / "tiny-gpt-oss"

MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}


def test_mxfp4_checkpoint_past_the_window_and_the_original_context(tmp_path: Path) -> None:
    model, reference = packed_pair(make_gpt_oss(), tmp_path, pack_mxfp4, MXFP4)
    assert [spec.window for spec in model.kv_specs] == [8, None]
    assert model.eos_token_ids == (7,)
    assert model.max_model_len == 512
    check_all_ways(model, reference, 100)


def test_dense_upload_with_other_heads_and_all_experts_chosen(tmp_path: Path) -> None:
    reference = make_gpt_oss(
        3, num_attention_heads=6, num_key_value_heads=1, head_dim=32, num_hidden_layers=3, num_experts_per_tok=4,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    )  # fmt: skip
    model, reference = packed_pair(reference, tmp_path, None)
    check_all_ways(model, reference, 90)


def test_what_the_ranks_agreed_on_reaches_every_moe_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = packed_pair(make_gpt_oss(), tmp_path, pack_mxfp4, MXFP4)
    seen: list[tuple[bool, int | None]] = []
    forward = MoeLayer.forward
    monkeypatch.setattr(
        MoeLayer,
        "forward",
        lambda self, x, **agreed: (seen.append((agreed["is_decode"], agreed["max_rank_tokens"])), forward(self, x))[1],
    )
    cache = PagedCache(model.kv_specs)
    for is_decode, most in (False, None), (True, 7):
        batch = dataclasses.replace(cache.batch({"a": [1]}), all_ranks_decode=is_decode, max_rank_tokens=most)
        with torch.inference_mode():
            run(model, batch, cache.layers)
    assert seen == [(False, None)] * len(model.moe_layers) + [(True, 7)] * len(model.moe_layers)


def test_window_of_128_at_its_edges(tmp_path: Path) -> None:
    model, reference = packed_pair(make_gpt_oss(4, sliding_window=128), tmp_path, pack_mxfp4, MXFP4)
    ids = prompt(300, 1)
    want = reference(torch.tensor([ids])).logits[0]
    cache = PagedCache(model.kv_specs)
    for length in (127, 128, 129, 300):
        batch = cache.batch({str(length): ids[:length]}, all_logits=True)
        check_close(run(model, batch, cache.layers), want[:length])


def test_positions_far_beyond_the_original_context(tmp_path: Path) -> None:
    model, reference = packed_pair(make_gpt_oss(5, max_position_embeddings=21000), tmp_path, None)
    positions = [1, 127, 4096, 20000]
    ids = prompt(len(positions), 2)
    want = reference(torch.tensor([ids]), position_ids=torch.tensor([positions])).logits[0]
    cache = PagedCache(model.kv_specs)
    batch = cache.batch({"a": ids}, all_logits=True)
    batch.positions_T.copy_(torch.tensor(positions))
    check_close(run(model, batch, cache.layers), want)


@rows("spelling", "rope_parameters", "rope_scaling")
def test_both_spellings_of_rope_mean_the_same(tmp_path: Path, spelling: str) -> None:
    reference = make_gpt_oss()
    tensors = state_by_file_name(reference, tmp_path)
    rope = {"factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    rope["original_max_position_embeddings"] = 32
    if spelling == "rope_parameters":
        changes = {"rope_parameters": rope | {"rope_type": "yarn", "rope_theta": 150000.0}}
    else:
        changes = {"rope_parameters": None, "rope_scaling": rope | {"type": "yarn"}, "rope_theta": 150000.0}
    write(tmp_path, tensors, changes)
    model = build_model(tmp_path, ModelSettings())
    ids = prompt(50, 3)
    cache = PagedCache(model.kv_specs)
    got = run(model, cache.batch({"a": ids}, all_logits=True), cache.layers)
    check_close(got, reference(torch.tensor([ids])).logits[0])


def test_a_config_without_rope_has_yarn_as_in_transformers(tmp_path: Path) -> None:
    """It ran plain rope."""
    reference = make_gpt_oss(7, rope_parameters=None)
    tensors = state_by_file_name(reference, tmp_path)
    write(tmp_path, tensors, {"rope_parameters": None})
    model = build_model(tmp_path, ModelSettings())
    ids = prompt(50, 3)
    cache = PagedCache(model.kv_specs)
    got = run(model, cache.batch({"a": ids}, all_logits=True), cache.layers)
    check_close(got, reference(torch.tensor([ids])).logits[0])


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    reference = make_gpt_oss(6, tie_word_embeddings=True)
    model, reference = packed_pair(reference, tmp_path, None)
    ids = prompt(30, 4)
    cache = PagedCache(model.kv_specs)
    got = run(model, cache.batch({"a": ids}, all_logits=True), cache.layers)
    check_close(got, reference(torch.tensor([ids])).logits[0])


def test_bf16_stays_near_fp32(tmp_path: Path) -> None:
    _, reference = packed_pair(make_gpt_oss(), tmp_path, pack_mxfp4, MXFP4)
    half = build_model(tmp_path, ModelSettings(dtype=torch.bfloat16, router_logits_dtype="bfloat16"))
    assert half.dtype == torch.bfloat16
    ids = prompt(40, 5)
    want = reference(torch.tensor([ids])).logits[0]
    cache = PagedCache(half.kv_specs, dtype=torch.bfloat16)
    got = run(half, cache.batch({"a": ids}, all_logits=True), cache.layers)
    assert got.dtype == torch.float32
    error = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.median() < 0.05  # a token whose experts change by rounding may differ more


def test_fp8_cache_of_the_bundled_model_costs_a_few_percent() -> None:
    """A trained model: in a random one, a small error chooses other experts."""
    model = build_model(ASSETS, ModelSettings())
    ids = prompt(50, 5)
    exact = PagedCache(model.kv_specs)
    want = run(model, exact.batch({"a": ids}, all_logits=True), exact.layers)
    rounded = PagedCache(model.kv_specs, dtype=torch.float8_e4m3fn)
    batches = [rounded.batch({"a": ids[:40]}, all_logits=True), *(rounded.batch({"a": [i]}) for i in ids[40:])]
    got = torch.cat([run(model, batch, rounded.layers) for batch in batches])
    assert 1e-3 < (got - want).norm() / want.norm() < 0.1  # keys and values are off by up to 2^-4
