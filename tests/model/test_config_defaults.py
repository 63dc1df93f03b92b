"""What a config.json leaves out has transformers' values; what null says; and the other spellings of a key."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, GptOssConfig

from loaders.hf_config import read_config
from model.config import ModelSettings, UnsupportedModelError
from model.families.base import Family
from model.families.deepseek_v3 import DeepseekV3Family
from model.families.gpt_oss import GptOssFamily
from model.registry import build_model, make_family
from model.rope_config import RopeConfig
from tests.model.checkpoints import make_deepseek, make_gpt_oss
from tests.tables import rows


def family_of(folder: Path, model: Any, changes: dict[str, Any], nulls: Collection[str] = ()) -> Family:
    """The family of a config with these changes; None removes a key, `nulls` are null."""
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"architectures": [type(model).__name__]} | changes
    kept = {key: value for key, value in config.items() if value is not None}
    path.write_text(json.dumps(kept | dict.fromkeys(nulls)))
    return make_family(read_config(folder))


def test_gpt_oss_without_its_optional_keys(tmp_path: Path) -> None:
    names = ("layer_types", "swiglu_limit", "swiglu_alpha", "rms_norm_eps", "head_dim", "tie_word_embeddings")
    family = family_of(tmp_path, make_gpt_oss(num_hidden_layers=3), dict.fromkeys(names))
    assert isinstance(family, GptOssFamily)
    assert family.windows == [8, None, 8], "even layers slide"
    assert (family.moe.activation.alpha, family.moe.activation.beta, family.moe.activation.limit) == (1.702, 1.0, 7.0)
    assert (family.norm_eps, family.head_dim, family.is_head_tied) == (1e-5, GptOssConfig().head_dim, False)
    null = family_of(tmp_path, make_gpt_oss(), {}, ["head_dim"])
    assert isinstance(null, GptOssFamily)
    assert null.head_dim == 64 // 4, "hidden_size / num_attention_heads"


@rows("key", "num_local_experts", "num_experts")
def test_both_spellings_of_the_experts(tmp_path: Path, key: str) -> None:
    """Transformers takes the second for the first."""
    changes = {"num_local_experts": None, "num_experts": None} | {key: 6}
    assert family_of(tmp_path, make_gpt_oss(), changes).moe.num_experts == 6
    with pytest.raises(UnsupportedModelError, match="num_local_experts and num_experts contradict each other"):
        family_of(tmp_path, make_gpt_oss(), {"num_local_experts": 6, "num_experts": 7})


@rows("key", "num_experts_per_tok", "experts_per_token")
def test_both_spellings_of_the_experts_per_token(tmp_path: Path, key: str) -> None:
    changes = {"num_experts_per_tok": None, "experts_per_token": None} | {key: 3}
    assert family_of(tmp_path, make_gpt_oss(), changes).moe.routing.top_k == 3


def test_deepseek_without_its_optional_keys(tmp_path: Path) -> None:
    """A scaling factor of 1.0 and no groups made nonsense of a model that relies on the defaults."""
    names = ("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "rms_norm_eps", "moe_layer_freq")
    names += ("n_shared_experts", "rope_parameters", "first_k_dense_replace")
    family = family_of(tmp_path, make_deepseek(num_hidden_layers=5), dict.fromkeys(names))
    assert isinstance(family, DeepseekV3Family)
    routing, theirs = family.moe.routing, DeepseekV3Config()
    assert (routing.normalize, routing.routed_scaling_factor) == (True, 2.5)
    assert (routing.normalize, routing.routed_scaling_factor) == (theirs.norm_topk_prob, theirs.routed_scaling_factor)
    assert (routing.num_groups, routing.num_kept_groups) == (8, 4) == (theirs.n_group, theirs.topk_group)
    assert family.num_shared == 1 == theirs.n_shared_experts
    assert family.norm_eps == 1e-6 == theirs.rms_norm_eps
    assert family.rope == RopeConfig(theta=10000.0)
    assert [family.is_moe_layer(layer) for layer in range(5)] == [False, False, False, True, True]
    assert theirs.first_k_dense_replace == 3


@rows("nulls", ("n_group",), ("topk_group",), ("n_group", "topk_group"))
def test_deepseek_with_null_for_its_groups_has_none(tmp_path: Path, nulls: tuple[str, ...]) -> None:
    routing = family_of(tmp_path, make_deepseek(), {}, nulls).moe.routing
    assert (routing.num_groups, routing.num_kept_groups) == (1, 1)


def test_deepseek_with_null_for_norm_topk_prob_leaves_weights_as_they_are(tmp_path: Path) -> None:
    """Transformers takes null for false."""
    assert not family_of(tmp_path, make_deepseek(), {}, ["norm_topk_prob"]).moe.routing.normalize


@rows(
    "missing, words",
    (("n_group",), "n_group 8, topk_group 2 .*do not fit.*; n_group had to be taken from the published model"),
    (("n_group", "topk_group"), "; n_group and topk_group had to be taken from the published model, since the file"),
    ((), "num_experts_per_tok 3 do not fit: .* hold enough experts$"),
)
def test_groups_that_do_not_fit_tell_defaults_from_the_files_own(
    tmp_path: Path, missing: tuple[str, ...], words: str
) -> None:
    changes = {"n_routed_experts": 10} | dict.fromkeys(missing)
    with pytest.raises(UnsupportedModelError, match=words):
        family_of(tmp_path, make_deepseek(), changes)


def test_every_second_layer_has_experts(tmp_path: Path) -> None:
    family = family_of(tmp_path, make_deepseek(num_hidden_layers=6), {"moe_layer_freq": 2, "first_k_dense_replace": 1})
    assert [family.is_moe_layer(layer) for layer in range(6)] == [False, False, True, False, True, False]


def test_the_first_moe_layer_is_checked_also_where_it_is_not_layer_0(tmp_path: Path) -> None:
    family_of(tmp_path, make_deepseek(), {})
    expected = {"auto": [True, False], "off": [False, False], "first": [True, False], "all": [True, True]}
    for selfcheck, checked in expected.items():
        model = build_model(tmp_path, ModelSettings(load_format="dummy", selfcheck=selfcheck))  # type: ignore[arg-type]
        assert [layer.selfcheck is not None for layer in model.moe_layers] == checked


def test_every_layer_is_checked_by_default_on_a_gpu() -> None:
    gpu, cpu = ModelSettings(device=torch.device("cuda")), ModelSettings()
    assert (gpu.selfcheck, gpu.checked_layers, cpu.checked_layers) == ("auto", "all", "first")
    assert ModelSettings(device=torch.device("cuda"), selfcheck="first").checked_layers == "first"
    assert ModelSettings(selfcheck="all").checked_layers == "all"
