"""Numbers that a damaged file, or an export gone wrong, leaves in the weights end the start and name the tensor."""

import re
from pathlib import Path

import pytest
import torch

from loaders.errors import CheckpointError
from model.config import ModelSettings
from model.registry import build_model
from moe import WeightFormatError
from tests.loaders.expert_files import Tensors
from tests.model.checkpoints import make_deepseek, make_gpt_oss, pack_fp8, pack_mxfp4, state_by_file_name, write
from tests.tables import rows

NAN, INF = float("nan"), float("inf")
MASKED = (".sinks", ".router.bias", ".e_score_correction_bias")  # -inf: no sink, an expert that is never chosen
Uploads = dict[str, tuple[Tensors, str]]


@pytest.fixture(scope="module")
def uploads(tmp_path_factory: pytest.TempPathFactory) -> Uploads:
    """Tensors and config.json of a good checkpoint of each kind."""
    made: Uploads = {}
    for kind, make, pack in (("gpt_oss", make_gpt_oss, pack_mxfp4), ("deepseek", make_deepseek, pack_fp8)):
        folder = tmp_path_factory.mktemp(kind)
        tensors, _ = pack(state_by_file_name(make(), folder))
        made[kind] = tensors, (folder / "config.json").read_text()
    return made


def build_with(folder: Path, upload: tuple[Tensors, str], changed: Tensors) -> None:
    tensors, config = upload
    (folder / "config.json").write_text(config)
    write(folder, tensors | changed)
    build_model(folder, ModelSettings())


@rows("value", NAN, INF, -INF)
@rows(
    "kind, name",
    ("gpt_oss", "model.norm.weight"),
    ("gpt_oss", "model.layers.1.input_layernorm.weight"),
    ("gpt_oss", "model.layers.1.self_attn.k_proj.bias"),
    ("gpt_oss", "model.layers.1.self_attn.o_proj.bias"),
    ("gpt_oss", "model.layers.1.self_attn.sinks"),
    ("gpt_oss", "model.layers.1.mlp.router.weight"),
    ("gpt_oss", "model.layers.1.mlp.router.bias"),
    ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj_bias"),
    ("gpt_oss", "model.layers.1.mlp.experts.down_proj_bias"),
    ("deepseek", "model.layers.2.self_attn.q_a_layernorm.weight"),
    ("deepseek", "model.layers.2.mlp.gate.weight"),
    ("deepseek", "model.layers.2.mlp.gate.e_score_correction_bias"),
)
def test_a_small_tensor_must_be_finite(tmp_path: Path, uploads: Uploads, kind: str, name: str, value: float) -> None:
    """A NaN in a router only meant "never choose this expert": the start passed, and the answers were wrong."""
    broken = uploads[kind][0][name].clone()
    broken.view(-1)[-3] = value
    if value == -INF and name.endswith(MASKED):
        build_with(tmp_path, uploads[kind], {name: broken})  # which passes the self-check, too
        return
    words = f"model.safetensors: tensor '{name}': its values must be finite numbers, found {value};"
    with pytest.raises(CheckpointError, match=re.escape(words)):
        build_with(tmp_path, uploads[kind], {name: broken})


@rows(
    "kind, name, index, byte, words",
    ("deepseek", "model.layers.1.mlp.experts.5.up_proj.weight", (7, 7), 0x7F, "layer 1: the fp8_block .* expert 5"),
    ("gpt_oss", "model.layers.0.mlp.experts.down_proj_scales", (3, 7), 254, "layer 0: the mxfp4 .* expert 3"),
)
def test_damaged_expert_weights_are_not_blamed_on_the_kernel(
    tmp_path: Path, uploads: Uploads, kind: str, name: str, index: tuple[int, ...], byte: int, words: str
) -> None:
    """0x7F is the NaN of E4M3, and 254 stands for 2^127."""
    broken = uploads[kind][0][name].clone()
    broken.view(torch.uint8)[index] = byte
    with pytest.raises(WeightFormatError, match=f"{words} give NaN or infinity"):
        build_with(tmp_path, uploads[kind], {name: broken})
