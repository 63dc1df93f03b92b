"""The trainer's model and rounding against transformers, and the shipped folder as a stranger would load it."""

import json
from pathlib import Path

import pytest
import torch

from tools.tiny_models import checkpoint
from tools.tiny_models.attend import DenseAttend, FlexAttend
from tools.tiny_models.checkpoint import Progress
from tools.tiny_models.data.example import user
from tools.tiny_models.families.base import logits
from tools.tiny_models.families.gpt_oss.dialect import ASSETS, DIALECT
from tools.tiny_models.families.gpt_oss.export import as_exported, packed
from tools.tiny_models.families.gpt_oss.family import GptOssFamily
from tools.tiny_models.families.gpt_oss.model import Shape, hidden_states, init_weights, rope_tables
from tools.tiny_models.families.gpt_oss.quant import fake_quantize, pack, straight_through
from tools.tiny_models.generate import write
from tools.tiny_models.rounding import round_e2m1

LUT = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
QUESTIONS = {"What is the capital of France?": "Paris", "12+30": "42", "Reverse the word lemon": "nomel"}


def test_rounding_ties_go_to_the_even_code_and_gradients_pass() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0, -2.5])
    assert round_e2m1(ties).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -2.0]
    w = torch.randn(2, 4, 32, requires_grad=True)
    straight_through(w).sum().backward()
    assert torch.equal(w.grad, torch.ones_like(w))


def test_packing_holds_what_training_rounded_to() -> None:
    w = torch.randn(3, 8, 96, generator=torch.Generator().manual_seed(0)) * 0.1
    blocks, scales = pack(w)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
    assert torch.equal((LUT[codes] * torch.exp2(scales.float() - 127)[..., None]).flatten(-2), fake_quantize(w))


@pytest.fixture(scope="module")
def shipped() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    return AutoModelForCausalLM.from_pretrained(
        ASSETS, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )


def test_the_folder_is_small_and_awkward_enough() -> None:
    shape = Shape.load(ASSETS / "config.json")
    assert sum(path.stat().st_size for path in ASSETS.iterdir()) <= 16_000_000
    for size in (shape.hidden, shape.inner):
        assert size % 32 == 0
        assert size % 128 != 0


# Uncompiled flex attention is slow, which is all the warning says; its results are what is compared here.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_our_forward_equals_transformers(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Mxfp4Config

    config = json.loads((ASSETS / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}  # one of each kind
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = Shape.load(tmp_path / "config.json")
    noise = torch.Generator().manual_seed(1)
    weights = {
        name: value + 0.2 * torch.randn(value.shape, generator=noise) if value.dim() == 1 else value
        for name, value in init_weights(shape).items()
    }
    save_file(packed(weights), tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    ).float()  # transformers 5.17 leaves the experts in bf16
    ids = torch.randint(0, 4080, (1, 200), generator=noise)
    docs = (torch.arange(200) >= 30).long()[None]
    positions = torch.cat((torch.arange(30), torch.arange(170)))
    rope = tuple(table[positions][None, None] for table in rope_tables(shape, 200))
    rounded = as_exported(weights)
    states, _ = hidden_states(shape, rounded, ids, rope, DenseAttend(shape, docs))
    ours, wanted = logits(rounded, states), theirs(ids[:, 30:]).logits  # beyond the window of 128
    assert float((ours[:, 30:] - wanted).norm() / wanted.norm()) < 1e-4
    flexed, _ = hidden_states(shape, rounded, ids, rope, FlexAttend(shape, docs))
    assert float((flexed - states).norm() / states.norm()) < 1e-4


def test_weights_of_a_checkpoint_come_back(tmp_path: Path) -> None:
    weights = init_weights(Shape.load(ASSETS / "config.json"))
    checkpoint.save(tmp_path / "checkpoint", weights, {}, Progress(family="gpt_oss", stage=1))
    assert max(path.stat().st_size for path in (tmp_path / "checkpoint").iterdir()) < 16 * 2**20
    found, _, _ = checkpoint.load(tmp_path / "checkpoint")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@torch.no_grad()
def test_writing_many_rows_equals_writing_one() -> None:
    family = GptOssFamily()
    weights = family.init_weights(2)
    prompts = [[5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15]]
    together = write(family, weights, prompts, stop=set(), max_new=6)
    assert together == [write(family, weights, [prompt], stop=set(), max_new=6)[0] for prompt in prompts]


@torch.no_grad()
def test_the_shipped_folder_answers_in_transformers(shipped: torch.nn.Module) -> None:
    encoder = DIALECT.encoder()
    for question, wanted in QUESTIONS.items():
        prompt = encoder.text(DIALECT.render([user(question)], add_generation_prompt=True))
        out = shipped.generate(torch.tensor([prompt]), max_new_tokens=80, do_sample=False)
        text = encoder.decode(out[0, len(prompt) :].tolist())
        assert text.startswith("<|channel|>")
        assert text.endswith("<|return|>")
        assert wanted in text.split("final<|message|>")[1]
