"""The CPU emulators that stand for FlashInfer in CI, against the real kernels, on the very bytes `prepare` made."""

from typing import Any

import pytest
import torch

from moe import Activation, MoeBackend, StandardDispatchOutput
from moe.formats import Bf16Weight, Fp8BlockWeight, Mxfp4Weight, Weight
from moe.registry import load_backend
from tests.emulators.cutlass import emulate
from tests.gpu.common import (
    DEEPSEEK_V4,
    GPT_OSS,
    WEIGHT_ONLY,
    experts_of,
    make_runner,
    own_part,
    relative_error,
    tokens_and_routing,
)

pytestmark = pytest.mark.gpu
NUM_EXPERTS, NUM_TOKENS = 8, 40
# The card's last bits before a quantizer decide now and then between two E4M3 numbers: 0.017 on an H100.
FP8 = 0.025


def to_cpu(value: Any) -> Any:
    """A keyword argument with its tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    return [to_cpu(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("kind", "backend", "activation", "hidden", "inter", "ep_size"),
    [
        (Mxfp4Weight, MoeBackend.FLASHINFER_MXFP4, GPT_OSS, 2880, 2880, 1),
        (Mxfp4Weight, MoeBackend.FLASHINFER_MXFP4, GPT_OSS, 2880, 2880, 2),
        (Mxfp4Weight, MoeBackend.FLASHINFER_MXFP4, DEEPSEEK_V4, 1024, 512, 4),
        (Bf16Weight, MoeBackend.FLASHINFER_CUTLASS, GPT_OSS, 1024, 512, 1),
        (Bf16Weight, MoeBackend.FLASHINFER_CUTLASS, Activation(), 2880, 2880, 2),
        (Fp8BlockWeight, MoeBackend.FLASHINFER_CUTLASS, Activation(), 2048, 1024, 1),
        (Fp8BlockWeight, MoeBackend.FLASHINFER_CUTLASS, Activation(), 2048, 1024, 2),
    ],
)
def test_the_emulator_agrees_with_the_card(
    monkeypatch: pytest.MonkeyPatch, kind: type[Weight], backend: MoeBackend, activation: Activation, hidden: int,
    inter: int, ep_size: int,
) -> None:  # fmt: skip
    from flashinfer import fused_moe

    calls: list[dict[str, Any]] = []
    genuine = fused_moe.cutlass_fused_moe
    monkeypatch.setattr(fused_moe, "cutlass_fused_moe", lambda **call: calls.append(call) or genuine(**call))
    experts = experts_of(kind, NUM_EXPERTS, hidden, inter, activation is GPT_OSS)
    x, topk = tokens_and_routing(NUM_TOKENS, hidden, NUM_EXPERTS)
    part, topology = own_part(experts, ep_size, ep_size - 1)
    runner, config = make_runner(backend, part, activation, NUM_EXPERTS, topology.place)
    card = runner.run(StandardDispatchOutput(x, topk), load_backend(backend).prepare(part, config, topology))
    [call] = calls
    arguments = {name: to_cpu(value) for name, value in call.items()}
    error = relative_error(card.hidden_states.cpu(), emulate(arguments)[:, :hidden])
    assert error < (FP8 if kind is Fp8BlockWeight else WEIGHT_ONLY)
