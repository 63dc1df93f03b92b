"""The DeepSeek training model: what its parts see, correction biases, and the stage runner on a small model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tools.tiny_models import checkpoint
from tools.tiny_models.__main__ import main
from tools.tiny_models.attend import DenseAttend, FlexAttend
from tools.tiny_models.checkpoint import Progress
from tools.tiny_models.families.base import Stage
from tools.tiny_models.families.deepseek_v3.dialect import FILES
from tools.tiny_models.families.deepseek_v3.family import DeepseekV3Family
from tools.tiny_models.families.deepseek_v3.model import BIAS
from tools.tiny_models.stream import as_row
from tools.tiny_models.train import Trainer

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2, "kv_lora_rank": 16,
    "q_lora_rank": 24, "num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
STAGE = Stage(seconds=100, muon_lr=0.02, adam_lr=0.003, warmup=0.0, cooldown=0.0, rows=2, length=64)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads((FILES / "config.json").read_text()) | SMALL))
    return path


def batch(seed: int = 0, num_prompt: int = 15) -> torch.Tensor:
    """Two rows of two documents each, of 30 tokens, some of them prompt."""
    rng = np.random.default_rng(seed)
    documents = [(rng.integers(3, 1500, 30).tolist(), num_prompt) for _ in range(4)]
    return torch.from_numpy(np.stack([as_row(documents[:2], 64), as_row(documents[2:], 64)], axis=1)).long()


def make_trainer(config: Path, seed: int = 0) -> Trainer:
    family = DeepseekV3Family(config)
    return Trainer(family, STAGE, family.init_weights(seed), "cpu", compiles=False, flex=False)


@torch.no_grad()
def test_the_prediction_layer_sees_the_next_token_and_no_later_one(config: Path) -> None:
    family = DeepseekV3Family(config)
    weights = family.init_weights(0)
    attends = DenseAttend(family.shape, torch.zeros(1, 20, dtype=torch.long))
    cos, sin = (table[None, None] for table in family.rope_tables(20))

    def ahead(ids: torch.Tensor) -> torch.Tensor:
        states, _ = family.hidden_states(weights, ids[:, :20], (cos, sin), attends)
        return family.states_ahead(weights, states, ids[:, 1:21], (cos, sin), attends)[0]

    ids = torch.randint(3, 1500, (1, 21), generator=torch.Generator().manual_seed(3))
    changed = ids.clone()
    changed[0, 12] = 1501
    difference = (ahead(ids) - ahead(changed)).abs().amax(-1)[0]
    assert difference[:11].max() == 0
    assert difference[11] > 0


def test_the_prediction_layer_is_not_trained_across_documents(config: Path) -> None:
    """The last but one token of a document has a next token, but no token after it."""
    family = DeepseekV3Family(config)
    seen: list[torch.Tensor] = []
    plain = family.head_loss
    family.head_loss = lambda head, states, targets: seen.append(targets) or plain(head, states, targets)
    ids, targets, docs, positions = batch(num_prompt=1)
    cos, sin = (table[positions][:, None] for table in family.rope_tables(64))
    family.losses(
        family.init_weights(0),
        (ids, targets, docs, positions),
        (cos, sin),
        DenseAttend(family.shape, docs),
        torch.float32,
    )
    assert torch.equal(seen[0], targets)
    for at in range(64):
        wanted = torch.full((2,), -1) if at in (28, 29, 58, 59) or at > 59 else targets[:, min(at + 1, 63)]
        assert torch.equal(seen[1][:, at], wanted), at


def test_correction_biases_help_the_experts_with_little_load(config: Path) -> None:
    family = DeepseekV3Family(config)
    weights = family.init_weights(0)
    load = torch.tensor([0.9, 0.1] + [3 / 8] * 6)  # the even share is 3 of 8
    family.after_step(weights, [torch.zeros(8), load, load], factor=0.5)
    assert weights[f"model.layers.1.{BIAS}"][:3].tolist() == pytest.approx([-0.0005, 0.0005, 0.0])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_attention_is_the_same_attention(config: Path) -> None:
    family = DeepseekV3Family(config)
    weights = family.init_weights(0)
    ids, _, docs, positions = batch()
    rope = tuple(table[positions][:, None] for table in family.rope_tables(64))
    dense, flexed = (
        family.hidden_states(weights, ids, rope, a(family.shape, docs))[0] for a in (DenseAttend, FlexAttend)
    )
    assert float((flexed - dense).norm() / dense.norm()) < 1e-5


def test_every_rounding_trains_all_weights_but_the_biases(config: Path) -> None:
    trainer = make_trainer(config)
    for rounding in ("", *trainer.family.roundings):
        trainer.losses(batch(), rounding).total.backward()
        untrained = {name for name, value in trainer.weights.items() if value.grad is None or not value.grad.any()}
        assert untrained == {name for name in trainer.weights if name.endswith(BIAS)}, rounding
        for value in trainer.weights.values():
            value.grad = None


def test_a_resumed_run_takes_the_step_that_the_first_would_have_taken(config: Path, tmp_path: Path) -> None:
    first, second = make_trainer(config), make_trainer(config, seed=9)
    for seed in range(3):
        first.step(batch(seed), 1.0, "")
    checkpoint.save(tmp_path / "c", first.weights, first.optimizer.state(), Progress(family="deepseek_v3", stage=1))
    weights, momenta, _ = checkpoint.load(tmp_path / "c")
    with torch.no_grad():
        for name, value in second.weights.items():
            value.copy_(weights[name])
    second.optimizer.load(momenta)
    before = {name: value.detach().clone() for name, value in first.weights.items()}
    for trainer in (first, second):
        trainer.step(batch(7), 1.0, "w4a16")
    with torch.no_grad():
        for name, value in first.weights.items():  # the matrices' momenta are kept in bf16
            assert (second.weights[name] - value).norm() <= 0.05 * (value - before[name]).norm(), name


def test_twenty_steps_from_the_command_line(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    flags = [
        "train", "--family", "deepseek_v3", "--out", str(out), "--config", str(config), "--device", "cpu",
        "--attention", "dense", "--workers", "1", "--set", "rows=2", "--set", "length=256", "--set", "warmup=0",
    ]  # fmt: skip
    assert main([*flags, "--stage", "1", "--max-steps", "20"]) == 0
    shown = capsys.readouterr().out.splitlines()
    losses = [float(line.split(" loss ")[1].split()[0]) for line in shown if " step " in line]
    last = json.loads(shown[-1])
    assert losses[-1] < 7.0  # a fresh model's is ln(1536) = 7.3 and more
    assert (last["steps"], last["tokens"], last["is_done"]) == (20, 20 * 2 * 256, False)
    assert main([*flags, "--stage", "2", "--resume"]) == 1
    assert "goes on with stage 1" in capsys.readouterr().err
    assert main([*flags, "--stage", "2"]) == 1
    assert main([*flags, "--stage", "2", "--init", str(FILES)]) == 1
    assert "deepseek_v3 goes on from checkpoints only" in capsys.readouterr().err
    assert main([*flags, "--stage", "1", "--set", "colour=1"]) == 1
    assert "a stage has no ['colour']" in capsys.readouterr().err
