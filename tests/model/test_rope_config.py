"""Rope as real config.json files have it, in every spelling, what is left out, and refusals that name the key."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from loaders.errors import ModelConfigError
from loaders.hf_config import read_config
from model.config import UnsupportedModelError
from model.families.deepseek_v3 import DeepseekV3Family
from model.families.gpt_oss import GptOssFamily
from model.rope_config import RopeConfig, read_rope
from tests.loaders.test_hf_config import DEEPSEEK_V3, GPT_OSS_20B
from tests.tables import rows

PLAIN = RopeConfig(theta=10000.0)
YARN = {
    "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 32,
}  # fmt: skip
OLD_YARN = {key: value for key, value in YARN.items() if key != "rope_type"} | {"type": "yarn"}
READ_YARN = RopeConfig(
    theta=10000.0, rope_type="yarn", factor=8.0, original_max_position_embeddings=32, truncate=False
)  # fmt: skip


def rope(folder: Path, config: dict[str, Any], default: RopeConfig = PLAIN) -> RopeConfig:
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512} | config))
    return read_rope(read_config(folder), default)


@rows(
    "config, expected",
    (
        GPT_OSS_20B,
        RopeConfig(
            theta=150000.0, rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False
        ),
    ),
    (
        DEEPSEEK_V3,
        RopeConfig(
            theta=10000.0, rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=1.0,
            mscale_all_dim=1.0,
        ),
    ),
)  # fmt: skip
def test_both_spellings_mean_the_same(tmp_path: Path, config: dict[str, Any], expected: RopeConfig) -> None:
    """B31: transformers 5 writes `rope_parameters` with theta inside."""
    assert rope(tmp_path, config) == expected
    new = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
    scaling = {key: value for key, value in config["rope_scaling"].items() if key != "type"}
    new["rope_parameters"] = scaling | {"rope_type": "yarn", "rope_theta": config["rope_theta"]}
    assert rope(tmp_path, new) == expected


@rows(
    "config, expected",
    ({"rope_theta": 5000, "rope_scaling": None}, RopeConfig(theta=5000.0)),
    ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(theta=5e5)),
    ({"rope_parameters": {"rope_theta": 5e5}}, RopeConfig(theta=5e5)),
    ({"rope_parameters": {"rope_type": "default", "factor": 4.0}}, PLAIN),
)
def test_rope_without_scaling(tmp_path: Path, config: dict[str, Any], expected: RopeConfig) -> None:
    assert rope(tmp_path, config) == expected


@rows("value", 0, 0.0, None)
def test_no_mscale_is_what_published_code_takes_for_missing(tmp_path: Path, value: float | None) -> None:
    scaling = {"rope_type": "yarn", "factor": 2, "mscale": value, "mscale_all_dim": value}
    found = rope(tmp_path, {"rope_scaling": scaling})
    assert found.mscale is found.mscale_all_dim is None


def test_original_length_falls_back_to_what_the_file_has(tmp_path: Path) -> None:
    scaling = {"rope_scaling": {"rope_type": "yarn", "factor": 2}, "max_position_embeddings": 64}
    assert rope(tmp_path, scaling).original_max_position_embeddings == 64
    assert rope(tmp_path, scaling | {"initial_context_length": 32}).original_max_position_embeddings == 32
    scaling["rope_scaling"] |= {"original_max_position_embeddings": 16}
    assert rope(tmp_path, scaling).original_max_position_embeddings == 16
    at_top = {"original_max_position_embeddings": 8}  # wins, as in transformers
    assert rope(tmp_path, scaling | at_top).original_max_position_embeddings == 8


@rows("spelling", "rope_parameters", "rope_scaling")
@rows(
    "changes, words",
    ({"rope_theta": "big"}, "key 'rope_theta' must be a finite number, found 'big'"),
    ({"rope_theta": float("nan")}, "key 'rope_theta' must be a finite number, found nan"),
    ({"rope_theta": 0}, "rope_theta is 0: it must be above 0"),
    ({"rope_theta": -1e4}, "rope_theta is -10000: it must be above 0"),
    ({"rope_theta": 1}, "rope_theta is 1: it must be above 1"),
    ({"factor": 0}, "factor is 0: it must be above 0"),
    ({"factor": -2.0}, "factor is -2: it must be above 0"),
    ({"factor": float("inf")}, "key 'factor' must be a finite number, found inf"),
    ({"factor": 10**400}, "key 'factor' must be a finite number"),
    ({"beta_fast": "32"}, "key 'beta_fast' must be a finite number, found '32'"),
    ({"beta_fast": 0}, "beta_fast is 0: it must be above 0"),
    ({"beta_slow": -1}, "beta_slow is -1: it must be above 0"),
    ({"original_max_position_embeddings": "32"}, "key 'original_max_position_embeddings' must be a whole number"),
    ({"original_max_position_embeddings": -4}, "original_max_position_embeddings is -4: it must be at least 1"),
    ({"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0: it must be at least 1"),
    ({"truncate": "false"}, "key 'truncate' must be true or false, found 'false'"),
    ({"mscale": "x"}, "key 'mscale' must be a finite number"),
    ({"mscale_all_dim": -1}, "mscale_all_dim is -1: it must be above 0"),
    ({"attention_factor": "1.0"}, "key 'attention_factor' must be a finite number"),
    ({"attention_factor": float("nan")}, "key 'attention_factor' must be a finite number"),
    ({"mscale_all_dim": 1e308}, r"mscale_all_dim is 1e\+308: it must be at most 1000"),
    ({"attention_factor": 1001}, "attention_factor is 1001: it must be at most 1000"),
    ({"attention_factor": -1.0}, "attention_factor is -1: it must be above 0"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported; supported: 1"),
    ({"rope_type": "llama3"}, "rope_type 'llama3' is not supported; supported: default, yarn"),
    ({"rope_type": "linear"}, "rope_type 'linear' is not supported"),
    ({"rope_type": False}, "key 'rope_type' must be the name of a rope type, found False"),
    ({"rope_type": 0}, "key 'rope_type' must be the name of a rope type, found 0"),
    ({"rope_type": []}, "key 'rope_type' must be the name of a rope type"),
    ({"rope_type": ""}, "key 'rope_type' must be the name of a rope type, found ''"),
    ({"rope_type": None}, "key 'rope_type' must be the name of a rope type, found None"),
    ({"sliding_attention": YARN, "full_attention": YARN}, "for each kind of layer .sliding_attention, full_attention."),
)  # fmt: skip
def test_unusable_fields_are_refused_by_name(
    tmp_path: Path, spelling: str, changes: dict[str, Any], words: str
) -> None:
    """Served with NaN or another rope, or a traceback."""
    with pytest.raises((ModelConfigError, UnsupportedModelError), match=rf"config\.json, '{spelling}': .*{words}"):
        rope(tmp_path, {spelling: YARN | changes})


@rows(
    "config, words",
    ({"rope_theta": 0}, ": rope_theta is 0: it must be above 0"),
    ({"rope_theta": "big"}, ": key 'rope_theta' must be a finite number, found 'big'"),
    ({"rope_scaling": [1]}, ": key 'rope_scaling' must be an object"),
    ({"rope_scaling": {"type": "yarn"}}, ", 'rope_scaling': key 'factor' is missing"),
    ({"rope_scaling": {"factor": 4.0}}, ", 'rope_scaling': it has a factor, but no rope_type"),
    ({"rope_scaling": OLD_YARN | {"type": 0}}, ", 'rope_scaling': key 'type' must be the name of a rope type"),
    ({"partial_rotary_factor": 0.5}, ": partial_rotary_factor 0.5 is not supported"),
    ({"rope_parameters": {"sliding_attention": YARN, "full_attention": YARN}}, ", 'rope_parameters': a rope for each"),
)
def test_unusable_configs_are_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises((ModelConfigError, UnsupportedModelError), match=rf"config\.json{words}"):
        rope(tmp_path, config)


@rows(
    "scaling",
    YARN | {"factor": 2.0},
    YARN | {"rope_type": "default"},
    YARN | {"truncate": True},
    YARN | {"rope_theta": 5000.0},
)
def test_two_spellings_that_contradict_each_other_are_refused(tmp_path: Path, scaling: dict[str, Any]) -> None:
    """A `rope_scaling` beside `rope_parameters` was ignored."""
    config = {"rope_parameters": YARN | {"rope_theta": 10000.0}, "rope_scaling": scaling}
    with pytest.raises(UnsupportedModelError, match="rope_parameters and rope_scaling contradict each other"):
        rope(tmp_path, config)


@rows("theta", {}, {"rope_theta": 10000})
@rows("scaling", YARN, OLD_YARN, YARN | {"type": "yarn"}, {}, None, {"type": "yarn", "factor": 8, "truncate": False,
        "original_max_position_embeddings": 32})  # fmt: skip
def test_two_spellings_that_agree_are_fine(tmp_path: Path, theta: dict[str, Any], scaling: Any) -> None:
    config = {"rope_parameters": YARN | {"rope_theta": 10000.0}, "rope_scaling": scaling}
    assert rope(tmp_path, config | theta) == READ_YARN


@rows("top", {}, {"rope_theta": 777.0})
def test_a_theta_in_one_section_says_nothing_of_the_other(tmp_path: Path, top: dict[str, Any]) -> None:
    """Transformers takes `rope_scaling` with the theta at top level or the model's own; we took 5000 for both."""
    config = {"rope_parameters": YARN | {"rope_theta": 5000.0}, "rope_scaling": YARN} | top
    with pytest.raises(UnsupportedModelError, match="rope_parameters and rope_scaling contradict each other"):
        rope(tmp_path, config)


@rows("family", GptOssFamily, DeepseekV3Family)
@rows(
    "config",
    {},
    {"rope_theta": 5000.0},
    {"rope_scaling": None, "rope_theta": 5000.0},
    {"rope_scaling": {}},
    {"rope_parameters": None},
    {"rope_parameters": {}},
    {"rope_parameters": {}, "rope_theta": 5000.0},
    {"rope_parameters": {}, "rope_scaling": YARN},
    {"rope_parameters": {"rope_theta": 5000.0}},
    {"rope_parameters": YARN},
    {"rope_parameters": YARN, "rope_theta": 5000.0},
    {"rope_parameters": YARN | {"rope_theta": 7000.0}, "rope_theta": 5000.0},
    {"rope_scaling": OLD_YARN, "rope_theta": 5000.0},
    {"rope_scaling": OLD_YARN},
    {"rope_scaling": YARN | {"rope_theta": 5000.0, "partial_rotary_factor": 1.0}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": None}},
    {"rope_scaling": {"rope_type": "default", "factor": 4.0}},
    {"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 64}},
    {"original_max_position_embeddings": 256},
    {"original_max_position_embeddings": 256, "rope_scaling": OLD_YARN},
)
def test_what_transformers_reads_and_saves_is_read_the_same(
    tmp_path: Path, family: Any, config: dict[str, Any]
) -> None:
    """GPT-OSS without a word of rope has YaRN there. What it saves from any config is accepted."""
    kind = {GptOssFamily: "gpt_oss", DeepseekV3Family: "deepseek_v3"}[family]
    config = config | {"model_type": kind, "max_position_embeddings": 512}
    got = rope(tmp_path, config, family.default_rope)
    theirs = AutoConfig.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert rope(tmp_path, saved, family.default_rope) == got
    assert "rope_scaling" not in saved
    theirs.standardize_rope_params()  # the model does so once more, which counts for a length at top level
    scaling = theirs.rope_parameters
    assert (got.theta, got.rope_type) == (scaling["rope_theta"], scaling["rope_type"])
    if got.rope_type == "yarn":
        factor = scaling["factor"] or 512 / scaling["original_max_position_embeddings"]
        want = (factor, scaling["original_max_position_embeddings"], bool(scaling.get("truncate", True)))
        assert (got.factor, got.original_max_position_embeddings, got.truncate) == want
