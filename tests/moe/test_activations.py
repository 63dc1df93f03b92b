"""The gated activation: golden values of the three models, and inputs left as they were."""

import pytest
import torch

from moe import Activation, MoeConfigError
from moe.activations import gated_activation
from tests.moe.moe_layers import DEEPSEEK_V4, GPT_OSS, PLAIN
from tests.tables import rows


@rows(
    "activation, gate, up, expected",
    (GPT_OSS, 1, 1, 1.691592),
    (GPT_OSS, 8, -9, -41.99972),
    (GPT_OSS, -8, 3, -3.90657e-5),
    (GPT_OSS, 0.5, -1, 0.0),
    (GPT_OSS, 2, 9, 15.485269),
    (DEEPSEEK_V4, 1, 1, 0.731059),
    (DEEPSEEK_V4, 12, -11, -99.995460),
    (DEEPSEEK_V4, -12, 3, -2.21190e-4),
    (PLAIN, 1, 1, 0.731059),
    (PLAIN, 12, -11, -131.99919),
    (PLAIN, -100, 5, 0.0),
)
def test_golden_values(activation: Activation, gate: float, up: float, expected: float) -> None:
    got = gated_activation(torch.tensor([float(gate)]), torch.tensor([float(up)]), activation)
    assert got.item() == pytest.approx(expected, rel=1e-5, abs=1e-9)


@rows("dtype", torch.float32, torch.bfloat16)
@rows("activation", PLAIN, GPT_OSS, DEEPSEEK_V4, Activation(alpha=2.0), Activation(beta=0.5))
def test_inputs_stay_as_they_were_and_the_formula_holds(dtype: torch.dtype, activation: Activation) -> None:
    assert activation.is_plain == (activation is PLAIN)
    both = (20 * torch.randn(5, 64, generator=torch.Generator().manual_seed(0))).to(dtype)
    before = both.clone()
    gate, up = both.chunk(2, dim=-1)
    got = gated_activation(gate, up, activation)
    assert torch.equal(both, before)
    assert got.dtype == dtype
    limit = float("inf") if activation.limit is None else activation.limit
    g, u = gate.double().clamp(max=limit), up.double().clamp(-limit, limit)
    want = g * torch.sigmoid(activation.alpha * g) * (u + activation.beta)
    torch.testing.assert_close(got.double(), want, rtol=1e-5 if dtype == torch.float32 else 3e-2, atol=1e-5)


@rows("limit", 0.0, -1.0, float("nan"))
def test_a_limit_must_be_positive(limit: float) -> None:
    with pytest.raises(MoeConfigError, match="must be positive"):
        Activation(limit=limit)
