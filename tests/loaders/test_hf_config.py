"""Configs as the real checkpoints have them, in every spelling, and refusals that name key and file."""

import json
from pathlib import Path
from typing import Any

import pytest

from loaders.errors import ModelConfigError
from loaders.hf_config import HfConfig, read_config
from tests.tables import rows

GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "eos_token_id": 200002,
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "max_position_embeddings": 131072,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "eos_token_id": 1,
    "max_position_embeddings": 163840,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
}
DEEPSEEK_V4: dict[str, Any] = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV4ForCausalLM"],
    "expert_dtype": "fp4",
    "quantization_config": DEEPSEEK_V3["quantization_config"] | {"scale_fmt": "ue8m0"},
}
MODELOPT_FILE = {
    "producer": {"name": "modelopt", "version": "0.23.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", "model.layers.*.self_attn*", "model.layers.61*"],
    },
}
MODELOPT_SECTION = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head", "re:model.layers.61.*"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "config_groups": {},
}


def write(folder: Path, config: dict[str, Any], **others: Any) -> HfConfig:
    (folder / "config.json").write_text(json.dumps(config))
    for name, value in others.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return read_config(folder)


def test_gpt_oss(tmp_path: Path) -> None:
    config = write(tmp_path, GPT_OSS_20B, generation_config={"eos_token_id": [200002, 199999, 200012]})
    assert config.architecture == "GptOssForCausalLM"
    assert config.max_position_embeddings == 131072
    assert config.eos_token_ids == (200002, 199999, 200012)
    assert config.quantization.method == "mxfp4"
    assert config.quantization.ignore == ("model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head")


def test_deepseek_v3(tmp_path: Path) -> None:
    config = write(tmp_path, DEEPSEEK_V3)
    assert config.eos_token_ids == (1,)
    assert (config.quantization.method, config.quantization.weight_block_size) == ("fp8", (128, 128))


def test_deepseek_v4(tmp_path: Path) -> None:
    config = write(tmp_path, DEEPSEEK_V4)
    assert config.architecture == "DeepseekV4ForCausalLM"
    assert config.get("expert_dtype") == "fp4"
    assert config.get("num_hash_layers", 0) == 0


def test_modelopt_in_its_own_file(tmp_path: Path) -> None:
    scheme = write(tmp_path, {"architectures": ["X"]}, hf_quant_config=MODELOPT_FILE).quantization
    assert (scheme.method, scheme.algorithm, scheme.group_size) == ("modelopt", "NVFP4", 16)
    assert scheme.kv_cache_algorithm == "FP8"
    assert scheme.ignore == ("lm_head", "model.layers.*.self_attn*", "model.layers.61*")


def test_modelopt_in_config_json_and_in_both(tmp_path: Path) -> None:
    config = {"quantization_config": MODELOPT_SECTION}
    scheme = write(tmp_path, config).quantization
    assert (scheme.method, scheme.algorithm, scheme.kv_cache_algorithm) == ("modelopt", "NVFP4", "FP8")
    assert scheme.ignore == ("lm_head", "re:model.layers.61.*")
    both = write(tmp_path, config, hf_quant_config=MODELOPT_FILE).quantization
    assert (both.ignore, both.group_size) == (scheme.ignore, 16)


def test_modelopt_without_kv_cache_quantization(tmp_path: Path) -> None:
    inner = MODELOPT_FILE["quantization"] | {"kv_cache_quant_algo": None}
    scheme = write(tmp_path, {}, hf_quant_config={"quantization": inner}).quantization
    assert scheme.kv_cache_algorithm is None


def test_quark(tmp_path: Path) -> None:
    scheme = write(tmp_path, {"quantization_config": {"quant_method": "quark", "exclude": ["lm_head"]}}).quantization
    assert (scheme.method, scheme.ignore) == ("quark", ("lm_head",))


def test_no_quantization(tmp_path: Path) -> None:
    assert write(tmp_path, {}).quantization is None


@rows(
    "section, words",
    ({"quant_method": "fp8", "weight_block_size": [32, 32]}, r"FP8 with 'weight_block_size' \[32, 32\]"),
    ({"quant_method": "fp8", "weight_block_size": 128}, "FP8 with 'weight_block_size' 128"),
    ({"fmt": "e4m3"}, "lacks the key 'quant_method'"),
    ("fp8", "'quantization_config' must be an object"),
)
def test_unusable_quantization_settings_are_refused(tmp_path: Path, section: Any, words: str) -> None:
    with pytest.raises(ModelConfigError, match=rf"config\.json: .*{words}"):
        write(tmp_path, {"quantization_config": section})


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    """A section as llm-compressor writes it."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"]}


NVFP4_PACKED = compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
FOREIGN: list[tuple[dict[str, Any], str]] = [
    (NVFP4_PACKED, r"nvfp4-pack-quantized of compressed-tensors \(scales per tensor_group\)"),
    (compressed("float-quantized", num_bits=8, type="float", strategy="channel"), "float-quantized.*per channel"),
    (compressed("float-quantized", num_bits=8, type="float", strategy="block"), "float-quantized.*per block"),
    (compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group"), "mxfp4-pack-quantized"),
    (compressed("pack-quantized", num_bits=4, type="int", strategy="group"), "pack-quantized of compressed-tensors"),
    ({"quant_method": "compressed-tensors"}, "compressed-tensors of compressed-tensors"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq with 4 bits"),
    ({"quant_method": "awq", "bits": 4, "zero_point": True}, "awq with 4 bits"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8"),
    ({"quant_method": "mxfp8"}, "mxfp8"),
    ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "torchao"),
    (MODELOPT_SECTION | {"quant_algo": "MXFP8"}, "MXFP8 of ModelOpt"),
    (MODELOPT_SECTION | {"quant_algo": "W4A8_AWQ"}, "W4A8_AWQ of ModelOpt"),
    (
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4", "qscheme": "per_group"}}},
        "int4 per_group of quark",
    ),
    (
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}},
        "fp8_e4m3 per_channel of quark",
    ),
]


@rows("section, name", *FOREIGN)
def test_g44_a_foreign_format_is_refused_by_its_name(tmp_path: Path, section: dict[str, Any], name: str) -> None:
    """Field report G44: from config.json alone, with what is supported and what to do."""
    words = (
        rf"config\.json: the checkpoint is quantized as {name}.*\(supported: FP8 in 128 x 128 blocks.*another upload"
    )
    with pytest.raises(ModelConfigError, match=words):
        write(tmp_path, {"quantization_config": section})


@rows("value", 5, "lm_head", {"lm_head": True})
def test_g44_names_that_are_no_list_are_refused_by_key(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json: 'modules_to_not_convert' .* must be a list of names"):
        write(tmp_path, {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": value}})


@rows("file", "config.json", "generation_config.json", "hf_quant_config.json")
def test_json_that_is_nested_too_deeply_is_one_line(tmp_path: Path, file: str) -> None:
    write(tmp_path, {})
    (tmp_path / file).write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ModelConfigError, match=rf"{file}: cannot be read as JSON: it is nested too deeply"):
        read_config(tmp_path)


def test_g44_older_spellings_of_the_section_are_seen(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="nvfp4-pack-quantized"):
        write(tmp_path, {"compression_config": NVFP4_PACKED})
    with pytest.raises(ModelConfigError, match="lacks the key 'quant_method'"):
        write(tmp_path, {"quantization": {"group_size": 64, "bits": 4}})  # what MLX exports have


@rows(
    "section",
    compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    {"quant_method": "fp8", "activation_scheme": "static"},
    MODELOPT_SECTION | {"quant_algo": "MIXED_PRECISION"},
    MODELOPT_SECTION | {"quant_method": "modelopt_fp4"},
    {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}},
    {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}},
)
def test_formats_whose_tensors_the_readers_know_are_accepted(tmp_path: Path, section: dict[str, Any]) -> None:
    scheme = write(tmp_path, {"quantization_config": section}).quantization
    assert scheme.method == section["quant_method"]


@rows(
    "section, format_name",
    ({"quant_method": "mxfp4"}, "mxfp4"),
    (DEEPSEEK_V3["quantization_config"], "fp8_block"),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8_tensor"),
    (compressed("float-quantized", num_bits=8, type="float", strategy="tensor"), "fp8_tensor"),
    (MODELOPT_SECTION, "nvfp4"),
    (MODELOPT_SECTION | {"quant_algo": "FP8"}, "fp8_tensor"),
    (MODELOPT_SECTION | {"quant_algo": "MIXED_PRECISION"}, "nvfp4"),
    ({"quant_method": "modelopt_fp4"}, "nvfp4"),
    ({"quant_method": "modelopt_fp8"}, "fp8_tensor"),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}}, "mxfp4"),
    (
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}},
        "fp8_tensor",
    ),
)
def test_the_format_of_the_quantized_layers(tmp_path: Path, section: dict[str, Any], format_name: str) -> None:
    scheme = write(tmp_path, {"quantization_config": section}).quantization
    assert scheme.format_of("model.layers.0.mlp.experts.0.gate_proj") == format_name


@rows(
    "pattern, layers",
    ("model.layers.*.self_attn", {"model.layers.0.self_attn.q_proj"}),
    ("model.layers.*.self_attn*", {"model.layers.0.self_attn.q_proj"}),
    ("re:.*self_attn", {"model.layers.0.self_attn.q_proj"}),
    ("re:.*self_attn.*", {"model.layers.0.self_attn.q_proj"}),
    ("self_attn", {"model.layers.0.self_attn.q_proj"}),
    ("model.layers.1", {"model.layers.1.mlp.gate_proj"}),
    ("model.layers.0.mlp.gate", set()),
    ("attn", set()),
)
def test_layers_that_an_entry_leaves_plain(tmp_path: Path, pattern: str, layers: set[str]) -> None:
    scheme = write(tmp_path, {"quantization_config": {"quant_method": "quark", "exclude": [pattern]}}).quantization
    names = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate_proj", "model.layers.0.mlp.gate_proj")
    assert {name for name in names if scheme.format_of(name) == "bf16"} == layers


def test_an_entry_that_is_no_regex_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"'exclude' of the quantization: 're:\(' is no regex"):
        write(tmp_path, {"quantization_config": {"quant_method": "quark", "exclude": ["re:("]}})


@rows(
    "section, words",
    (DEEPSEEK_V3["quantization_config"], "quant_method 'fp8', hf_quant_config.json beside it says 'modelopt'"),
    ({"quant_method": "fp8", "weight_block_size": [32, 32]}, "quant_method 'fp8'"),
    (NVFP4_PACKED, "quant_method 'compressed-tensors'"),
    (MODELOPT_SECTION | {"quant_algo": "FP8"}, "quant_algo 'FP8', hf_quant_config.json beside it says 'NVFP4'"),
)
def test_g40_the_ancestors_section_in_config_json_is_left_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, section: dict[str, Any], words: str
) -> None:
    """Field report G40: an export writes hf_quant_config.json and leaves config.json as its ancestor had it."""
    scheme = write(tmp_path, {"quantization_config": section}, hf_quant_config=MODELOPT_FILE).quantization
    assert (scheme.method, scheme.algorithm, scheme.group_size) == ("modelopt", "NVFP4", 16)
    assert scheme.weight_block_size is None
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert words in record.message


@rows(
    "section, origin",
    (None, "hf_quant_config.json"),
    (DEEPSEEK_V3["quantization_config"], "hf_quant_config.json"),
    ({"quant_method": "modelopt"}, "hf_quant_config.json and config.json"),
)
@rows(
    "inner, words",
    ({"quant_algo": "W4A16_AWQ"}, "the checkpoint is quantized as W4A16_AWQ of ModelOpt"),
    ({"quant_algo": "NVFP4", "exclude_modules": "lm_head"}, "'exclude_modules' of the quantization must be a list"),
)
def test_the_file_with_the_unsupported_value_is_named(
    tmp_path: Path, section: Any, origin: str, inner: dict[str, Any], words: str
) -> None:
    """It was config.json, whatever file the value came from."""
    with pytest.raises(ModelConfigError) as error:
        write(tmp_path, {"quantization_config": section}, hf_quant_config={"quantization": inner})
    assert str(error.value).startswith(f"{tmp_path}/{origin}: {words}")


def test_hf_quant_config_must_hold_its_section(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"hf_quant_config\.json: key 'quantization' is missing"):
        write(tmp_path, {}, hf_quant_config={"producer": {}})


def test_require_names_key_and_file(tmp_path: Path) -> None:
    config = write(tmp_path, {"hidden_size": 64, "eps": 1, "flag": True, "nothing": None})
    assert config.require("hidden_size", int) == 64
    assert config.require("eps", float) == 1
    with pytest.raises(ModelConfigError, match=r"config\.json: key 'nothing' is missing"):
        config.require("nothing")
    with pytest.raises(ModelConfigError, match=r"config\.json: key 'hidden_size' must be a string, found 64"):
        config.require("hidden_size", str)
    with pytest.raises(ModelConfigError, match="key 'flag' must be a whole number or a finite number, found True"):
        config.require("flag", (int, float))


@rows("value", 10**400, float("inf"), float("nan"), "1", True, [1])
def test_a_number_must_be_finite(tmp_path: Path, value: Any) -> None:
    """A number of 400 digits was a traceback."""
    config = write(tmp_path, {"eps": value})
    with pytest.raises(ModelConfigError, match=r"config\.json: key 'eps' must be a finite number, found .{1,50}$"):
        config.require("eps", float)


def test_an_object_inside_is_a_config_of_its_own(tmp_path: Path) -> None:
    config = write(tmp_path, {"rope": {"factor": 2}, "nothing": None, "list": []})
    assert config.section("rope").require("factor", int) == 2
    assert config.section("nothing").raw == config.section("missing").raw == {}
    with pytest.raises(ModelConfigError, match=r"config\.json, 'rope': key 'theta' is missing"):
        config.section("rope").require("theta")
    with pytest.raises(ModelConfigError, match=r"config\.json: key 'list' must be an object"):
        config.section("list")


@rows("value", 0, 1, -5, 10**12, 10**400, 4096.0, "4096", True)
def test_an_impossible_context_is_refused(tmp_path: Path, value: Any) -> None:
    """They were tracebacks of torch."""
    config = write(tmp_path, {"max_position_embeddings": value})
    with pytest.raises(ModelConfigError, match=r"config\.json: key 'max_position_embeddings' must .{1,99}$"):
        _ = config.max_position_embeddings


def test_architecture_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="key 'architectures' is missing"):
        _ = write(tmp_path, {}).architecture
    with pytest.raises(ModelConfigError, match="must name a class"):
        _ = write(tmp_path, {"architectures": []}).architecture


def test_folders_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="no such folder"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ModelConfigError, match=r"config\.json: missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match="cannot be read as JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelConfigError, match="must hold a JSON object"):
        read_config(tmp_path)
