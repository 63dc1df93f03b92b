"""Golden rope tables of the real models, and the rotation itself."""

import itertools
import math

import pytest
import torch
from transformers import GptOssConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model.config import UnsupportedModelError
from model.rope import (
    RotaryTable,
    attention_factor,
    inverse_frequencies,
    pair_halves,
    rotate_,
    softmax_factor,
    yarn_range,
)
from model.rope_config import RopeConfig
from tests.tables import rows

GPT_OSS = RopeConfig(
    theta=150000.0, rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False
)
DEEPSEEK = RopeConfig(
    theta=10000.0, rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0
)


@rows("rope, bounds, golden",
        (
            GPT_OSS,
            (8.092779, 17.398025),
            {0: 1.0, 1: 0.6890443, 2: 0.4747821, 8: 0.05081327, 10: 0.01933500, 16: 4.564839e-4, 30: 4.387979e-7,
             31: 3.023511e-7},
        ),
        (
            DEEPSEEK,
            (10, 23),
            {1: 0.7498942, 2: 0.5623413, 8: 0.1, 10: 0.05623413, 11: 0.03900693, 16: 0.0055, 30: 4.445698e-6,
             31: 3.333804e-6},
        ),
    )  # fmt: skip
def test_yarn_frequencies(rope: RopeConfig, bounds: tuple[float, float], golden: dict[int, float]) -> None:
    assert yarn_range(rope, 64) == pytest.approx(bounds, abs=1e-6)
    frequencies = inverse_frequencies(rope, 64)
    assert frequencies.shape == (32,)
    for index, value in golden.items():
        assert frequencies[index].item() == pytest.approx(value, rel=1e-6)


def test_yarn_ramps_at_every_edge_are_those_of_transformers(subtests: pytest.Subtests) -> None:
    ramps = {
        "inside": (1e4, 4096), "begins below 0": (1e4, 64), "nearly empty": (1e4, 8), "empty": (1e4, 4),
        "ends above the last": (10.0, 4096), "wholly above": (3.0, 300),
    }  # fmt: skip
    for (ramp, (theta, context)), truncate in itertools.product(ramps.items(), (True, False)):
        with subtests.test(ramp=ramp, truncate=truncate):
            rope = RopeConfig(
                theta=theta, rope_type="yarn", factor=8.0, original_max_position_embeddings=context, truncate=truncate
            )
            parameters = {
                "rope_type": "yarn", "rope_theta": theta, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "original_max_position_embeddings": context, "truncate": truncate,
            }  # fmt: skip
            config = GptOssConfig(head_dim=16, max_position_embeddings=8 * context, rope_parameters=parameters)
            want, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
            torch.testing.assert_close(inverse_frequencies(rope, 16), want)
            assert attention_factor(rope) == pytest.approx(factor)


def test_two_corrections_that_must_not_be_confused() -> None:
    assert attention_factor(GPT_OSS) == pytest.approx(1.3465736, abs=1e-7)
    assert softmax_factor(GPT_OSS) == 1.0
    assert attention_factor(DEEPSEEK) == 1.0
    assert softmax_factor(DEEPSEEK) == pytest.approx(1.8738542, abs=1e-7)
    assert 192**-0.5 * softmax_factor(DEEPSEEK) == pytest.approx(0.13523378, abs=1e-8)


def test_plain_rope_and_a_given_factor() -> None:
    plain = RopeConfig(theta=100.0)
    torch.testing.assert_close(inverse_frequencies(plain, 4), torch.tensor([1.0, 0.1]))
    assert attention_factor(plain) == softmax_factor(plain) == 1.0
    given = RopeConfig(theta=100.0, rope_type="yarn", factor=4.0, attention_factor=1.25)
    assert attention_factor(given) == 1.25


def test_rotation_of_pairs_with_the_factor_on_cos_and_sin() -> None:
    table = RotaryTable(GPT_OSS, 64, 200, torch.device("cpu"))
    x = torch.randn(2, 3, 64)
    positions = torch.tensor([1, 127])
    want = torch.empty_like(x)
    for t, position in enumerate(positions.tolist()):
        for i, frequency in enumerate(inverse_frequencies(GPT_OSS, 64).tolist()):
            cos, sin = (1.3465736 * f(position * frequency) for f in (math.cos, math.sin))
            a, b = x[t, :, 2 * i], x[t, :, 2 * i + 1]
            want[t, :, 2 * i], want[t, :, 2 * i + 1] = a * cos - b * sin, b * cos + a * sin
    whole = torch.zeros(2, 5, 64)
    whole[:, :3] = x
    rotate_(whole[:, :3], table.at(positions))
    torch.testing.assert_close(whole[:, :3], want, rtol=1e-5, atol=1e-5)
    assert not whole[:, 3:].any()
    half = x.bfloat16()
    rotate_(half, table.at(positions))
    torch.testing.assert_close(half.float(), want, rtol=2e-2, atol=2e-2)


def test_pair_halves_puts_partners_side_by_side() -> None:
    rows = torch.arange(12).view(12, 1)
    assert pair_halves(rows, 6).flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert pair_halves(torch.arange(4), 4).tolist() == [0, 2, 1, 3]


def test_unsupported_kinds_are_named() -> None:
    with pytest.raises(UnsupportedModelError, match="7 dims"):
        inverse_frequencies(RopeConfig(theta=1e4), 7)
    with pytest.raises(UnsupportedModelError, match="original_max_position_embeddings"):
        inverse_frequencies(RopeConfig(theta=1e4, rope_type="yarn", factor=2.0), 8)
