"""Folders made by `tools.checkpoint_files`: the loader, `plan` and `explain` take them, and a full one runs."""

import json
import logging

import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from loaders.checkpoint import Checkpoint
from loaders.hf_config import read_config
from loaders.quant import inspect_linear
from loaders.safetensors_file import SafetensorsFile
from loaders.scales import float_scales
from model.config import ModelSettings
from model.load import open_source
from model.registry import make_family
from model.weights import check_shapes
from server import cli
from tests.engine.requests import request, run_all
from tools.checkpoint_files.__main__ import MODELS, main
from tools.checkpoint_files.tensors import Tensor, Values
from tools.checkpoint_files.values import chunks

FORMATS = {"gpt-oss-20b": "mxfp4", "gpt-oss-120b": "mxfp4", "deepseek-v3": "fp8_block", "deepseek-v3-nvfp4": "nvfp4"}
TENSORS = {"gpt-oss-20b": 459, "gpt-oss-120b": 687, "deepseek-v3": 91_991, "deepseek-v3-nvfp4": 180_364}
LAST_FILE = {
    "gpt-oss-20b": "model-00002-of-00002.safetensors",
    "gpt-oss-120b": "model-00014-of-00014.safetensors",
    "deepseek-v3": "model-00162-of-000162.safetensors",  # published: 163, since a file ends with some layers, too
    "deepseek-v3-nvfp4": "model-00080-of-00080.safetensors",
}
SHALLOW = 12  # layers
PREDICTION_LAYER = {"deepseek-v3": "1564 tensors (15424.2 MB)", "deepseek-v3-nvfp4": "788 tensors (26926.9 MB)"}
SMALL = {
    "gpt-oss-20b": ("--experts=4", "--hidden=64", "--intermediate=32", "--heads=8", "--vocab=4096"),
    "deepseek-v3": ("--experts=16", "--hidden=128", "--intermediate=128", "--dense-intermediate=128", "--heads=2",
                    "--vocab=4096"),
}  # fmt: skip
SMALL["deepseek-v3-nvfp4"] = SMALL["deepseek-v3"]


@pytest.fixture(scope="module", params=MODELS)
def sparse(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sparse") / request.param
    assert main([request.param, str(folder), "--sparse"]) == 0
    return folder


@pytest.fixture(scope="module")
def shallow(sparse, tmp_path_factory):
    """DeepSeek with few enough layers to read each name in moments, and enough to tell layer 1 from layer 11."""
    if not sparse.name.startswith("deepseek"):
        return sparse
    folder = tmp_path_factory.mktemp("shallow") / sparse.name
    assert main([sparse.name, str(folder), "--sparse", "--layers", str(SHALLOW)]) == 0
    return folder


@pytest.fixture
def no_data(monkeypatch):
    """Headers may be read, tensors not."""
    monkeypatch.setattr(SafetensorsFile, "view", lambda _self, name: pytest.fail(f"{name} was read"))


def names_of_linear(source, prefix):
    layout = inspect_linear(source, prefix)
    return {part.meta.name for part in layout.parts} | {layout.scale, layout.input_scale} - {None}


@pytest.mark.usefixtures("no_data")
def test_the_family_knows_every_tensor_of_a_sparse_checkpoint(shallow, caplog):
    """A model of one prediction layer (MTP) skips it and says so."""
    caplog.set_level(logging.INFO, logger="loaders")
    family = make_family(read_config(shallow))
    source = open_source(family, shallow, ModelSettings())
    family.skip_unneeded(source)
    specs = list(family.tensor_specs(source))
    check_shapes(source, specs)
    for spec in specs:
        source.mark_used(names_of_linear(source, spec.name) if spec.is_linear else {spec.name})
    source.finish()  # raises for a tensor that belongs to nothing
    moe_layers = [layer for layer in range(family.num_layers) if family.is_moe_layer(layer)]
    assert {family.expert_format(source, layer) for layer in moe_layers} == {FORMATS[shallow.name]}
    skipped = [record.getMessage() for record in caplog.records if "multi-token prediction" in record.getMessage()]
    expected = PREDICTION_LAYER.get(shallow.name)
    assert skipped == (
        [f"skipped {expected}: layers beyond num_hidden_layers = {SHALLOW} (multi-token prediction)"]
        if expected
        else []
    )


def test_a_sparse_checkpoint_has_the_published_size(sparse):
    """docs/measuring.md says where the published sizes are from."""
    index = json.loads((sparse / "model.safetensors.index.json").read_text())
    assert len(index["weight_map"]) == TENSORS[sparse.name]
    data_bytes = index["metadata"]["total_size"]
    file_bytes = sum(file.stat().st_size for file in sparse.glob("*.safetensors"))
    assert data_bytes < file_bytes < data_bytes + 200 * TENSORS[sparse.name]  # headers
    match sparse.name:
        case "gpt-oss-20b":
            assert data_bytes == 13_761_264_768
        case "gpt-oss-120b":
            assert data_bytes == 65_248_815_744
        case "deepseek-v3":
            assert file_bytes == pytest.approx(688_586_727_753, rel=1e-6)  # their headers are spelled otherwise
        case "deepseek-v3-nvfp4":
            assert round(file_bytes / 2**30) == 395
    assert max(file.name for file in sparse.glob("*.safetensors")) == LAST_FILE[sparse.name]


def test_a_sparse_checkpoint_takes_no_room(sparse):
    files = list(sparse.iterdir())
    assert sum(file.stat().st_size for file in files) > 13e9
    assert sum(file.stat().st_blocks * 512 for file in files) < 64e6


@pytest.mark.usefixtures("no_data")
def test_plan_and_explain_take_a_sparse_checkpoint(sparse, shallow, capsys):
    """Plan reads the headers of all layers where they are in the most files."""
    folder = sparse if sparse.name == "deepseek-v3" else shallow
    assert cli.main(["plan", "--model", str(folder), "--gpu", "h200", "--gpu-memory", "1000", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["weights"]["from_headers"]
    assert [path["format"] for path in plan["weights"]["experts"]] == [FORMATS[sparse.name]]
    assert plan["weights"]["stored"] >= 13_761_264_768
    assert cli.main(["explain", "--model", str(folder), "--gpu", "sm90", "--format", FORMATS[sparse.name]]) == 0
    assert "<- auto" in capsys.readouterr().out


@pytest.mark.parametrize("name", SMALL)
def test_a_small_full_checkpoint_serves_a_token(name, tmp_path):
    folder = tmp_path / "full"
    assert main([name, str(folder), "--full", "random", "--layers", "2", "--threads", "2", *SMALL[name]]) == 0
    core = EngineCore(EngineConfig(model=folder, device="cpu", max_model_len=64, num_pages=16, selfcheck="all"))
    assert len(core.info.selfcheck) == len(core.info.moe_paths) > 0
    outputs = run_all(core, [request("one", range(10, 30), 1, ignore_eos=True, logprobs=1)])["one"]
    assert outputs[-1].finish_reason == "length"
    assert -30 < outputs[-1].logprobs[0].logprob < 0


def test_experts_differ_and_gate_and_up_share_their_scalars(tmp_path):
    name = "deepseek-v3-nvfp4"
    assert main([name, str(tmp_path / "full"), "--full", "--layers", "2", *SMALL[name]]) == 0
    checkpoint = Checkpoint.open(tmp_path / "full")
    experts = [f"model.layers.1.mlp.experts.{expert}" for expert in (0, 1)]
    weights = [checkpoint.view(f"{expert}.gate_proj.weight") for expert in experts]
    assert not torch.equal(*weights)
    for suffix in ("weight_scale_2", "input_scale"):
        gate, up, down = (checkpoint.view(f"{experts[0]}.{part}_proj.{suffix}") for part in ("gate", "up", "down"))
        assert torch.equal(gate, up)
        assert not torch.equal(gate, down)


@pytest.mark.parametrize("values", [v for v in Values if "SCALE" in v.name and v is not Values.E8M0_SCALE])
def test_every_scale_is_finite_and_above_zero(values):
    dtype = "F8_E4M3" if values is Values.NVFP4_BLOCK_SCALE else "F32"
    tensor = Tensor("scales", dtype, (17_000_000,), values)  # more than the pool holds
    for _, data in chunks(tensor, 2**27):
        scales = torch.frombuffer(bytearray(data), dtype=torch.float8_e4m3fn if dtype == "F8_E4M3" else torch.float32)
        float_scales(scales.float(), None)


def test_chunks_cover_a_tensor_without_holes():
    tensor = Tensor("w", "BF16", (1000, 20_000), Values.WEIGHT)
    position = 0
    for place, data in chunks(tensor, 1_000_001 * 2):
        assert place == position
        assert 0 < len(data) <= 1_000_001 * 2
        position += len(data)
    assert position == tensor.num_bytes


def test_what_cannot_be_written_is_said(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("keep")
    assert main(["gpt-oss-20b", str(tmp_path)]) == 1
    assert "is not empty" in capsys.readouterr().err
    for arguments in (["--dense-intermediate", "64"], ["--layers", "0"]):
        with pytest.raises(SystemExit):
            main(["gpt-oss-20b", str(tmp_path / "new"), *arguments])
    assert not (tmp_path / "new").exists()
