"""Layers, tokens and routings that the tests on a card share. Everything is made on the device."""

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moe import Activation, MoeA2ABackend, MoeBackend, MoeRunner, MoeRunnerConfig, RankPlace, StandardTopK, Topology
from moe.formats import ExpertWeights, Weight
from tests.moe.configs import ALONE, rank_config
from tests.moe.joining import stack

DEVICE = torch.device("cuda")
GPT_OSS = Activation(alpha=1.702, beta=1.0, limit=7.0)
DEEPSEEK_V4 = Activation(limit=10.0)
TOKENS = (0, 1, 2, 3, 7, 64, 257, 4096)
TOP_K, FACTOR = 4, 2.5
WEIGHT_ONLY = 0.005  # bf16 activations and results
FP8_PLAN = 0.06  # where a plan of the triton backend rounds activations to FP8; 0.041 to 0.048 on an H100 and an H200


@contextmanager
def no_waiting(*, is_on: bool = True) -> Iterator[None]:
    """Whatever waits for the device in here is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")  # torch says so once
        torch.cuda.set_sync_debug_mode("error" if is_on else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def weights(kind: type[Weight], num_experts: int, rows: int, cols: int, seed: int) -> Weight:
    """Random experts, each with a magnitude of its own, quantized one at a time."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    return stack(
        [
            kind.quantize(torch.randn(rows, cols, device=DEVICE, generator=g) * (1 + 0.02 * expert) / cols**0.5)  # type: ignore[attr-defined]
            for expert in range(num_experts)
        ]
    )


@functools.lru_cache(maxsize=1)
def experts_of(kind: type[Weight], num_experts: int, hidden: int, inter: int, has_bias: bool) -> ExpertWeights:
    """One layer; only the last one asked for is kept."""
    g = torch.Generator(DEVICE).manual_seed(3)
    b13 = b2 = None
    if has_bias:
        b13 = torch.randn(num_experts, 2 * inter, device=DEVICE, generator=g).bfloat16()
        b2 = torch.randn(num_experts, hidden, device=DEVICE, generator=g).bfloat16()
    return ExpertWeights(
        w13=weights(kind, num_experts, 2 * inter, hidden, 1), w2=weights(kind, num_experts, hidden, inter, 2),
        b13=b13, b2=b2,
    )  # fmt: skip


def tokens_and_routing(num_tokens: int, hidden: int, num_experts: int) -> tuple[torch.Tensor, StandardTopK]:
    """bf16 tokens large enough for clamps; one expert idle; some ids -1."""
    g = torch.Generator(DEVICE).manual_seed(4)
    x = (torch.randn(num_tokens, hidden, device=DEVICE, generator=g) * 5).bfloat16()
    scores = torch.rand(num_tokens, num_experts, device=DEVICE, generator=g)
    scores[:, 1] = -1
    ids = scores.topk(TOP_K, dim=-1).indices.int()
    ids[num_tokens // 2 :, 0] = -1
    chosen = torch.randn(num_tokens, TOP_K, device=DEVICE, generator=g)
    return x, StandardTopK(torch.softmax(chosen, dim=-1) * FACTOR, ids)


def local(experts: ExpertWeights, start: int, count: int) -> ExpertWeights:
    return ExpertWeights(
        w13=experts.w13.narrow(0, start, count),
        w2=experts.w2.narrow(0, start, count),
        b13=None if experts.b13 is None else experts.b13[start : start + count],
        b2=None if experts.b2 is None else experts.b2[start : start + count],
    )


def own_part(experts: ExpertWeights, ep_size: int, ep_rank: int) -> tuple[ExpertWeights, Topology]:
    """What one expert-parallel rank has."""
    count = experts.num_experts // ep_size
    return local(experts, ep_rank * count, count), Topology(device=DEVICE, ep_size=ep_size, ep_rank=ep_rank)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of the whole output."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def make_runner(
    backend: MoeBackend, experts: ExpertWeights, activation: Activation, num_experts: int, place: RankPlace = ALONE
) -> tuple[MoeRunner, MoeRunnerConfig]:
    config = rank_config(
        num_experts=num_experts, hidden_size=experts.hidden_size, intermediate_size=experts.intermediate_size,
        top_k=TOP_K, activation=activation, place=place,
    )  # fmt: skip
    return MoeRunner(backend, MoeA2ABackend.NONE, config), config
