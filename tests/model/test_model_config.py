"""What is refused before any weight is read: unknown architectures, unsupported features, sizes that do not fit."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from loaders.errors import CheckpointError, ModelConfigError
from loaders.hf_config import read_config
from loaders.source import TensorSource
from model.config import ModelSettings, ModelSettingsError, UnsupportedModelError
from model.load import load_model
from model.parallel import ParallelLayout
from model.registry import build_model, make_family
from moe import MoeA2ABackend, MoeBackend, UnsupportedPathError
from tests.model.checkpoints import make_deepseek, make_gpt_oss, pack_mxfp4, state_by_file_name, write
from tests.tables import rows


@pytest.fixture(autouse=True)
def _no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: TensorSource, name: str) -> torch.Tensor:
        pytest.fail(f"{name} was read before everything was checked")

    monkeypatch.setattr(TensorSource, "view", refuse)


@pytest.fixture(scope="module", params=["gpt_oss", "deepseek"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_gpt_oss() if request.param == "gpt_oss" else make_deepseek()
    return request.param, folder, state_by_file_name(model, folder)


def refused(
    saved: tuple[str, Path, Any], tmp_path: Path, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    _, folder, tensors = saved
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    write(tmp_path, tensors, changes)
    with pytest.raises(error, match=text):
        build_model(tmp_path, ModelSettings())


@pytest.mark.parametrize("saved", ["gpt_oss"], indirect=True)
def test_gpt_oss_refusals(subtests: pytest.Subtests, saved: Any, tmp_path: Path) -> None:
    for changes, text in [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*known: DeepseekV3ForCausalLM, GptOssForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": False}, "attention_bias False"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple of num_key_value_heads 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5.*num_local_experts 4"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, num_hidden_layers is 2"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": [["full_attention"], 5]}, r"layer_types \['full_attention'\] is not supported"),
        ({"layer_types": []}, "layer_types has 0 entries, num_hidden_layers is 2"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"head_dim": 10**400}, "head_dim is 1000.*: it must be at most 2147483647"),
        ({"swiglu_alpha": 0}, "swiglu_alpha is 0: it must be above 0"),
        ({"swiglu_limit": -1}, "swiglu_limit is -1: it must be above 0"),
        (
            {"hidden_size": 96},
            r"embed_tokens.*\[96, 64\], but vocab_size, hidden_size in config.json make it \[96, 96\]",
        ),
        (
            {"head_dim": 32},
            r"q_proj.weight.*num_attention_heads, head_dim, hidden_size in config.json make it \[128, 64\]",
        ),
        ({"num_local_experts": 8}, "num_local_experts, hidden_size in config.json"),
        ({"intermediate_size": 64}, "gate_up_proj_bias.*intermediate_size"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}}, "llama3"),
    ]:
        with subtests.test(changes=changes, text=text):
            refused(saved, tmp_path, changes, UnsupportedModelError, text)


@pytest.mark.parametrize("saved", ["deepseek"], indirect=True)
def test_deepseek_refusals(subtests: pytest.Subtests, saved: Any, tmp_path: Path) -> None:
    for changes, text in [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'.*supported: sigmoid"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"rope_interleave": False}, "rope_interleave False"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2"),
        ({"n_group": 3}, "n_routed_experts 8, n_group 3"),
        ({"topk_group": 1}, "num_experts_per_tok 3"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim is 15"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ({"n_group": 0}, "n_group is 0: it must be at least 1"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0: it must be above 0"),
        ({"kv_lora_rank": 31}, "kv_lora_rank is 31: it must be even"),
        ({"kv_lora_rank": 24}, "kv_a_layernorm.*kv_lora_rank in config.json"),
        ({"v_head_dim": 16}, r"kv_b_proj.weight.*v_head_dim, kv_lora_rank in config.json make it \[160, 32\]"),
        ({"moe_intermediate_size": 32}, "experts.0.gate_proj.weight.*moe_intermediate_size"),
        ({"n_shared_experts": 2}, "shared_experts.*n_shared_experts"),
    ]:
        with subtests.test(changes=changes, text=text):
            refused(saved, tmp_path, changes, UnsupportedModelError, text)


def test_missing_keys_and_wrong_types_name_the_key(saved: Any, tmp_path: Path) -> None:
    refused(saved, tmp_path, {"hidden_size": None}, ModelConfigError, "hidden_size")
    refused(saved, tmp_path, {"vocab_size": "many"}, ModelConfigError, "vocab_size")
    refused(saved, tmp_path, {"tie_word_embeddings": "no"}, ModelConfigError, "tie_word_embeddings")


def test_numbers_and_ids_that_no_model_has_are_refused(
    subtests: pytest.Subtests, saved: tuple[str, Path, Any], tmp_path: Path
) -> None:
    """NaN for every request, a traceback, or an error after all weights were read."""
    nan, inf = float("nan"), float("inf")
    names = {"gpt_oss": ("swiglu_alpha", "swiglu_limit"), "deepseek": ("routed_scaling_factor",)}[saved[0]]
    for name, value in itertools.product((*names, "rms_norm_eps"), (nan, inf, -inf, 10**400, "1", True)):
        with subtests.test(name=name, value=value):
            refused(saved, tmp_path, {name: value}, ModelConfigError, f"key '{name}' must be a finite number")
    for value in (0, -1e-5):
        with subtests.test(value=value):
            refused(saved, tmp_path, {"rms_norm_eps": value}, UnsupportedModelError, "rms_norm_eps is .*above 0")
    for value in ("x", [[1]], 2.5, True):
        with subtests.test(value=value):
            refused(saved, tmp_path, {"eos_token_id": value}, ModelConfigError, "'eos_token_id' must hold ids")
    for value in (0, 10**12):
        with subtests.test(value=value):
            refused(saved, tmp_path, {"max_position_embeddings": value}, ModelConfigError, "max_position_embeddings")


@pytest.mark.parametrize("saved", ["gpt_oss"], indirect=True)
@rows("value", 5, True, 0.5, "sliding_attention", {"0": "full_attention"})
def test_layer_types_must_be_a_list(saved: tuple[str, Path, Any], tmp_path: Path, value: Any) -> None:
    refused(saved, tmp_path, {"layer_types": value}, ModelConfigError, "key 'layer_types' must be a list")


def test_missing_tensor_is_named(saved: Any, tmp_path: Path) -> None:
    kind, folder, tensors = saved
    without = {name: tensor for name, tensor in tensors.items() if name != "model.layers.1.self_attn.o_proj.weight"}
    refused((kind, folder, without), tmp_path, {}, CheckpointError, re.escape("model.layers.1.self_attn.o_proj.weight"))


@pytest.mark.parametrize("saved", ["deepseek"], indirect=True)
def test_a_bias_that_the_model_would_ignore_is_refused_by_name(
    subtests: pytest.Subtests, saved: Any, tmp_path: Path
) -> None:
    """Section G: such checkpoints loaded, and answered as if the bias were zero."""
    for name in [
        "lm_head",
        "model.layers.1.self_attn.o_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.2.self_attn.kv_b_proj",
        "model.layers.1.mlp.shared_experts.up_proj",
        "model.layers.2.mlp.experts.7.gate_proj",
    ]:
        with subtests.test(name=name):
            kind, folder, tensors = saved
            bias = {f"{name}.bias": torch.zeros(tensors[f"{name}.weight"].shape[0])}
            words = rf"model\.safetensors: tensor '{re.escape(name)}\.bias': the model has no bias here"
            refused((kind, folder, tensors | bias), tmp_path, {}, UnsupportedModelError, words)


@pytest.mark.parametrize("saved", ["gpt_oss"], indirect=True)
def test_a_bias_of_gpt_oss_that_the_model_would_ignore_is_refused_by_name(saved: Any, tmp_path: Path) -> None:
    """Section G: its attention and router have biases, its head has none."""
    kind, folder, tensors = saved
    words = r"tensor 'lm_head\.bias': the model has no bias here"
    refused((kind, folder, tensors | {"lm_head.bias": torch.zeros(96)}), tmp_path, {}, UnsupportedModelError, words)


def test_impossible_expert_path_is_refused_first(tmp_path: Path) -> None:
    tensors, _ = pack_mxfp4(state_by_file_name(make_gpt_oss(), tmp_path))
    write(tmp_path, tensors, {"quantization_config": {"quant_method": "mxfp4"}})
    with pytest.raises(UnsupportedPathError, match="flashinfer_mxfp4"):
        build_model(tmp_path, ModelSettings(moe_backend=MoeBackend.FLASHINFER_MXFP4))
    ranks = ParallelLayout(dp_size=2, ep_size=2)
    with pytest.raises(UnsupportedPathError, match="mori"):
        load_model(
            make_family(read_config(tmp_path)),
            tmp_path,
            ModelSettings(moe_a2a_backend=MoeA2ABackend.MORI, layout=ranks),
        )


@rows(
    "changes, text",
    ({"selfcheck": "maybe"}, "selfcheck is 'maybe'"),
    ({"load_format": "gguf"}, "load_format is 'gguf'"),
    ({"router_logits_dtype": "float16"}, "router_logits_dtype is 'float16'"),
    ({"dtype": torch.float16}, "dtype is torch.float16"),
)
def test_settings_are_checked(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelSettingsError, match=text):
        ModelSettings(**changes)


def test_default_dtype_follows_the_device() -> None:
    assert ModelSettings().model_dtype == torch.float32
    assert ModelSettings(device=torch.device("cuda")).model_dtype == torch.bfloat16
    assert ModelSettings(dtype=torch.bfloat16).model_dtype == torch.bfloat16
