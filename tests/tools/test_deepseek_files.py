"""The DeepSeek exports: our training model, our engine and transformers agree, and the folders are small enough."""

import json
import logging
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from loaders.checkpoint import Checkpoint
from model.config import ModelSettings
from model.registry import build_model
from tests.model.paged import PagedCache, run
from tools.tiny_models import checkpoint
from tools.tiny_models.__main__ import main
from tools.tiny_models.attend import DenseAttend
from tools.tiny_models.checkpoint import Progress
from tools.tiny_models.evaluate import shortfalls
from tools.tiny_models.families.base import Weights, logits
from tools.tiny_models.families.deepseek_v3 import export, family
from tools.tiny_models.families.deepseek_v3.card import scores
from tools.tiny_models.families.deepseek_v3.family import DeepseekV3Family

LENGTH, CUT = 120, 30
FAMILY = DeepseekV3Family()
LAYERS = FAMILY.shape.layers


@pytest.fixture(autouse=True, scope="module")
def _short_calibration() -> Iterator[None]:
    """On two rows of conversations instead of four."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family, "CALIBRATION_ROWS", 2)
        yield


@pytest.fixture(scope="module")
def weights() -> Weights:
    """Random everywhere, norms and correction biases too."""
    noise = torch.Generator().manual_seed(1)
    fresh = FAMILY.init_weights(0)
    return {
        name: value + 0.2 * torch.randn(value.shape, generator=noise) if value.dim() == 1 else value
        for name, value in fresh.items()
    }


@pytest.fixture(scope="module")
def folders(weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    fp8, nvfp4 = FAMILY.export(weights, tmp_path_factory.mktemp("models"))
    return {"fp8": fp8, "w4a16": nvfp4}


def prompt() -> torch.Tensor:
    return torch.randint(3, FAMILY.vocab_size - 20, (1, LENGTH), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def trained_logits(weights: Weights, ids: torch.Tensor) -> torch.Tensor:
    """Of the second of two documents packed into one row."""
    docs = (torch.arange(LENGTH) >= CUT).long()[None]
    positions = torch.cat((torch.arange(CUT), torch.arange(LENGTH - CUT)))
    cos, sin = (table[positions][None, None] for table in FAMILY.rope_tables(LENGTH))
    states, _ = FAMILY.hidden_states(weights, ids, (cos, sin), DenseAttend(FAMILY.shape, docs))
    return logits(weights, states)[0, CUT:]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("kind", ["fp8", "w4a16"])
@torch.no_grad()
def test_engine_and_transformers_give_the_logits_of_training(
    weights: Weights, folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    ids, dense = prompt(), FAMILY.variant(weights, kind)
    ours = trained_logits(dense, ids)
    own = {
        n: v for n, v in export.published(FAMILY.shape, dense).items() if not n.startswith(f"model.layers.{LAYERS}.")
    }
    save_file(
        {name: value.contiguous() for name, value in own.items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    (tmp_path / "config.json").write_text(json.dumps(export.config_of("nvfp4")))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(ids[:, CUT:]).logits[0]
    assert relative(ours, theirs) < 1e-4
    with caplog.at_level(logging.INFO):
        model = build_model(folders[kind], ModelSettings())
    assert len([record for record in caplog.records if "prediction" in record.getMessage()]) == 1
    cache = PagedCache(model.kv_specs)
    served = run(model, cache.batch({"a": ids[0, CUT:].tolist()}, all_logits=True), cache.layers)
    assert relative(served, theirs) < 1e-4


def test_folders_fit_their_budgets_with_the_prediction_layer(weights: Weights, folders: dict[str, Path]) -> None:
    sizes = {kind: sum(path.stat().st_size for path in folder.iterdir()) for kind, folder in folders.items()}
    assert sizes["fp8"] <= 14_000_000
    assert sizes["w4a16"] <= 10_000_000
    for folder in folders.values():
        names = set(Checkpoint.open(folder).names())
        for tensor in (
            "embed_tokens.weight",
            "shared_head.head.weight",
            "eh_proj.weight",
            "mlp.experts.7.up_proj.weight",
        ):
            assert f"model.layers.{LAYERS}.{tensor}" in names
    nvfp4 = set(Checkpoint.open(folders["w4a16"]).names())
    assert {n for n in nvfp4 if n.endswith("weight_scale")} == {
        f"{n.removesuffix('.weight')}.weight_scale"
        for n in export.published(FAMILY.shape, weights)
        if export.is_nvfp4(FAMILY.shape, n)
    }
    assert not [n for n in nvfp4 if "scale" in n and ("self_attn" in n or ".gate." in n or f"layers.{LAYERS}." in n)]


def test_gate_and_up_share_their_scalars(folders: dict[str, Path]) -> None:
    source = Checkpoint.open(folders["w4a16"])
    for prefix in ("model.layers.0.mlp", "model.layers.1.mlp.experts.3", "model.layers.4.mlp.shared_experts"):
        for scalar in ("weight_scale_2", "input_scale"):
            gate, up = (source.tensor(f"{prefix}.{name}_proj.{scalar}") for name in ("gate", "up"))
            assert gate == up > 0


def test_cards_hold_the_reports_figures_and_anyone_may_read_the_files(tmp_path: Path) -> None:
    checkpoint.save(
        tmp_path / "run", FAMILY.init_weights(0), {},
        Progress(family="deepseek_v3", stage=3, steps=4321, tokens=1_500_000_000, runs=3),
    )  # fmt: skip
    results = {
        f"{mode} {variant}": {"addition": 90.0 + number, "facts": 99.0}
        for mode in FAMILY.dialect.modes
        for number, variant in enumerate(FAMILY.variants)
    }
    (tmp_path / "blind.json").write_text(json.dumps({"split": "blind", "limit": 500, "results": results}))
    command = ["export", "--family", "deepseek_v3", "--weights", str(tmp_path / "run"), "--out", str(tmp_path)]
    assert main([*command, "--report", str(tmp_path / "blind.json")]) == 0
    for kind, row in (
        ("fp8", "| addition | 90.0 | 91.0 | 90.0 | 91.0 |"),
        ("nvfp4", "| addition | 90.0 | 92.0 | 93.0 | 90.0 | 92.0 | 93.0 |"),
    ):
        folder = tmp_path / export.NAMES[kind]
        card = (folder / "README.md").read_text()
        assert row in card
        assert "1.50 billion tokens in 4,321 steps and 3 runs" in card
        stated = re.search(r"\| files \| (.*) MB \|", card)
        assert stated
        others = sum(path.stat().st_size for path in folder.iterdir() if path.name != "README.md")
        assert float(stated[1]) == pytest.approx(others / 1e6, abs=0.005)
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}
    del results["direct w4a4"]
    with pytest.raises(ValueError, match="the report has no direct w4a4"):
        scores("nvfp4", {"results": results})


def test_evaluation_names_what_misses_its_bar_and_what_quantization_costs() -> None:
    results = {
        "thinking master": {"addition": 96.0, "facts": 98.5, "units": 60.0},
        "thinking fp8": {"addition": 95.5, "facts": 97.9, "units": 58.9},
        "thinking w4a4": {"addition": 10.0, "facts": 10.0, "units": 10.0},
        "direct fp8": {"addition": 50.0, "facts": 50.0, "units": 50.0},
    }
    assert shortfalls(results) == [
        "thinking fp8: facts is 97.90, its bar 98",
        "thinking fp8: units is 58.90, the master weights' 60.00",
    ]


@torch.no_grad()
def test_rounded_activations_change_the_logits_a_little(weights: Weights) -> None:
    """W4A4 by the calibrated scales that the file has; and by those of the tensor itself, as in training."""
    ids = prompt()
    exact = trained_logits(FAMILY.variant(weights, "w4a16"), ids)
    static = trained_logits(FAMILY.variant(weights, "w4a4"), ids)
    dynamic = trained_logits(FAMILY.rounded(FAMILY.variant(weights, "fp8"), "w4a4"), ids)
    assert 1e-3 < relative(static, exact) < 0.5
    assert 1e-3 < relative(dynamic, exact) < 0.5
