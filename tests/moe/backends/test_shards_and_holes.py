"""Emulated paths over tp and ep, and with expert ids of -1: parts sum to one rank, holes add exactly zero."""

from typing import Any

import pytest
import torch

from moe import Activation, MoeA2ABackend, MoeBackend, MoeRunner, StandardDispatchOutput, StandardTopK, Topology
from moe.check.reference import reference_moe
from moe.formats import Bf16Weight, ExpertWeights, Fp8BlockWeight, Fp8TensorWeight, Mxfp4Weight, Nvfp4Weight
from moe.registry import load_backend
from tests.emulators.aiter import install_aiter
from tests.emulators.deep_gemm import install_deep_gemm
from tests.moe.backends import hostile
from tests.moe.dispatch.several_ranks import layer_config

E, K, H, T = 8, 3, 128, 11
PLAIN = Activation()
KINDS: dict[str, Any] = {
    "bf16": Bf16Weight, "fp8_block": Fp8BlockWeight, "fp8_tensor": Fp8TensorWeight, "mxfp4": Mxfp4Weight,
    "nvfp4": Nvfp4Weight,
}  # fmt: skip
# (backend, format, multiple of a shard of the intermediate axis, hidden size, tolerance)
PATHS = [
    (MoeBackend.TORCH, "bf16", 32, H, 1e-5),
    (MoeBackend.TORCH, "fp8_block", 128, H, 1e-5),
    (MoeBackend.TORCH, "fp8_tensor", 32, H, 1e-5),
    (MoeBackend.TORCH, "mxfp4", 32, H, 1e-5),
    (MoeBackend.TORCH, "nvfp4", 16, H, 1e-5),
    (MoeBackend.DEEP_GEMM, "fp8_block", 128, H, 1e-3),
    (MoeBackend.AITER, "bf16", 32, H, 1e-5),
    (MoeBackend.AITER, "fp8_block", 128, H, 1e-3),
    (MoeBackend.AITER, "mxfp4", 256, 256, 1e-3),
]
SIZES = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8), (4, 2), (8, 8)]  # tp, ep


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    install_aiter(monkeypatch, wide=True)
    install_deep_gemm(monkeypatch, wide=True)
    monkeypatch.setattr("moe.backends.deep_gemm.backend.RESULT_DTYPE", torch.float32)


def experts_of(name: str, hidden: int, inter: int) -> ExpertWeights:
    w13, w2 = hostile.dense_experts(E, hidden, inter)
    return ExpertWeights(w13=KINDS[name].quantize(w13), w2=KINDS[name].quantize(w2))


def run(backend: MoeBackend, experts: ExpertWeights, x: torch.Tensor, topk: StandardTopK, topology: Topology) -> Any:
    dtype = torch.float32 if backend is MoeBackend.TORCH else torch.bfloat16
    config = layer_config(experts, dtype, num_experts=E, place=topology)
    info = load_backend(backend).prepare(experts, config, topology)
    return MoeRunner(backend, MoeA2ABackend.NONE, config).run(StandardDispatchOutput(x.to(dtype), topk), info)


def reference(backend: MoeBackend, x: torch.Tensor, topk: StandardTopK, experts: ExpertWeights) -> torch.Tensor:
    quantize = load_backend(backend).formats[experts.format_name].activation_quant
    return reference_moe(x, topk, experts, PLAIN, quantize_input=quantize)


@pytest.mark.parametrize(("backend", "name", "block", "hidden", "tolerance"), PATHS)
def test_all_ranks_sum_to_one(
    subtests: pytest.Subtests,
    libraries: None,
    backend: MoeBackend,
    name: str,
    block: int,
    hidden: int,
    tolerance: float,
) -> None:
    experts, x, topk = experts_of(name, hidden, 8 * block), hostile.tokens(T, hidden), hostile.routing(T, E, K)
    want = reference(backend, x, topk, experts)
    for tp_size, ep_size in SIZES:
        with subtests.test(tp_size=tp_size, ep_size=ep_size):
            total = sum_over_ranks(backend, experts, x, topk, tp_size, ep_size, block)
            assert hostile.relative_error(total, want) < tolerance


def sum_over_ranks(
    backend: MoeBackend,
    experts: ExpertWeights,
    x: torch.Tensor,
    topk: StandardTopK,
    tp_size: int,
    ep_size: int,
    block: int,
) -> torch.Tensor:
    total = torch.zeros(x.shape)
    for tp_rank in range(tp_size):
        for ep_rank in range(ep_size):
            local = hostile.shard(experts, tp=(tp_size, tp_rank), ep=(ep_size, ep_rank), block=block)
            topology = Topology(tp_size=tp_size, tp_rank=tp_rank, ep_size=ep_size, ep_rank=ep_rank)
            result = run(backend, local, x, topk, topology)
            assert result.is_partial == (tp_size * ep_size > 1), "exactly one place reduces, and knows when"
            total += result.hidden_states
    return total


@pytest.mark.parametrize("num_tokens", [7, 300])
@pytest.mark.parametrize(("backend", "name", "block", "hidden", "tolerance"), PATHS)
def test_holes_add_exactly_zero(
    libraries: None, backend: MoeBackend, name: str, block: int, hidden: int, tolerance: float, num_tokens: int
) -> None:
    experts, x = experts_of(name, hidden, block), hostile.tokens(num_tokens, hidden)
    full = hostile.routing(num_tokens, E, K)
    is_hole = torch.rand(full.ids.shape, generator=torch.Generator().manual_seed(9)) < 0.3
    holes = StandardTopK(full.weights, full.ids.masked_fill(is_hole, -1))
    got = run(backend, experts, x, holes, Topology()).hidden_states
    assert hostile.relative_error(got, reference(backend, x, holes, experts)) < tolerance
    nothing_left = (holes.ids < 0).all(-1)
    assert bool(nothing_left.any())
    assert torch.equal(got[nothing_left].float(), torch.zeros(int(nothing_left.sum()), hidden))
    nobody = StandardTopK(full.weights, torch.full_like(full.ids, -1))
    assert torch.equal(run(backend, experts, x, nobody, Topology()).hidden_states.float(), torch.zeros_like(x).float())


@pytest.mark.parametrize(("backend", "name", "block", "hidden", "tolerance"), PATHS)
def test_the_factor_in_the_weights_scales_the_output_once(
    libraries: None, backend: MoeBackend, name: str, block: int, hidden: int, tolerance: float
) -> None:
    experts, x, topk = experts_of(name, hidden, block), hostile.tokens(T, hidden), hostile.routing(T, E, K)
    plain = StandardTopK(topk.weights / hostile.FACTOR, topk.ids)
    once = run(backend, experts, x, plain, Topology()).hidden_states
    scaled = run(backend, experts, x, topk, Topology()).hidden_states
    assert hostile.relative_error(scaled, once.float() * hostile.FACTOR) < 1e-6
