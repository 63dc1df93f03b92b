"""Tall tiles beside other work on the card: the same bits every time.

Triton lets a product run on while the next weights are unpacked, and PTX leaves it open what happens when the registers
of a running product are written. A kernel that depends on timing would show it here, where the matrix units, the L2 and
the memory are shared with a second stream.
"""

import pytest
import torch

from moe import StandardDispatchOutput
from moe.backends.triton.backend import TritonBackend
from moe.config import MoeA2ABackend, MoeBackend
from moe.formats import Bf16Weight, Fp8BlockWeight, Mxfp4Weight, Nvfp4Weight, Weight
from moe.runner import MoeRunner
from moe.topology import Topology
from tests.gpu.common import DEVICE, GPT_OSS, experts_of, tokens_and_routing
from tests.moe.configs import rank_config

pytestmark = pytest.mark.gpu
ROUNDS = 150


@pytest.mark.parametrize("num_tokens", [64, 256, 1024, 4096])
@pytest.mark.parametrize("kind", [Mxfp4Weight, Nvfp4Weight, Fp8BlockWeight, Bf16Weight])
def test_the_same_bits_beside_a_busy_stream(kind: type[Weight], num_tokens: int) -> None:
    config = rank_config(num_experts=32, hidden_size=2880, intermediate_size=2880, top_k=4, activation=GPT_OSS)
    info = TritonBackend().prepare(experts_of(kind, 32, 2880, 2880, True), config, Topology(device=DEVICE))
    runner = MoeRunner(MoeBackend.TRITON, MoeA2ABackend.NONE, config)
    batch = StandardDispatchOutput(*tokens_and_routing(num_tokens, 2880, 32))
    want = runner.run(batch, info).hidden_states.clone()
    square = torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)
    block, side = torch.empty(2**28, dtype=torch.uint8, device=DEVICE), torch.cuda.Stream()
    num_different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    torch.cuda.synchronize()  # `block` may lie where the first run, which is still going on, has its rows
    for step in range(ROUNDS):
        with torch.cuda.stream(side):  # products, then copies, then nothing, out of step with the layer
            for _ in range(step % 5):
                torch.mm(square, square)
            block[: 2**27].copy_(block[2**27 :]) if step % 3 else None
        num_different += (runner.run(batch, info).hidden_states != want).sum()
    torch.cuda.synchronize()
    assert not want.isnan().any()
    assert int(num_different) == 0
