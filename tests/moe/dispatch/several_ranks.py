"""Runs one MoE layer on several emulated ranks: dispatch, the runner, combine. Every rank has its own tokens."""

from collections.abc import Callable
from typing import Any

import torch

from moe import Activation, MoeA2ABackend, MoeBackend, MoeRunner, MoeRunnerConfig, StandardTopK, Topology
from moe.config import DispatchDtype, DispatchFormat
from moe.dispatch.deepep import DeepepBuffer, DeepepDispatcher
from moe.dispatch.deepep_settings import DeepepMode, DeepepSettings, EpShape
from moe.formats import ExpertWeights
from moe.registry import load_backend
from tests.emulators.ranks import Rank, RankGroup, run_ranks
from tests.moe.backends import hostile
from tests.moe.moe_layers import PLAIN, make_config

E, I, K = 8, 64, 3
LIMIT = 8  # tokens of a rank that a buffer holds


def layer_config(experts: ExpertWeights, dtype: torch.dtype, **changes: object) -> MoeRunnerConfig:
    """Of a layer with as many experts; at another `place` than alone, these are those of all expert-parallel ranks."""
    return make_config(experts, **({"top_k": K, "dtype": dtype, "activation": PLAIN} | changes))


def rank_inputs(num_tokens: list[int], hidden: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, StandardTopK]]:
    """Different tokens and routing on every rank, with -1 ids; a rank may have none."""
    sizes = enumerate(num_tokens)
    tokens = [hostile.tokens(count, hidden, seed=10 + rank, size=3.0).to(dtype) for rank, count in sizes]
    return [(x, hostile.routing(len(x), E, K, seed=20 + rank)) for rank, x in enumerate(tokens)]


def only_rank() -> Rank:
    """A group of one."""
    return Rank(RankGroup(1), 0)


def run_layer(
    experts: ExpertWeights,
    inputs: list[tuple[torch.Tensor, StandardTopK]],
    *,
    backend: MoeBackend,
    a2a: MoeA2ABackend,
    formats: tuple[DispatchFormat, ...],
    dispatcher_for: Callable[[Rank, MoeRunnerConfig], Any],
    dtype: torch.dtype,
    activation: Activation = PLAIN,
    allocator: Any = None,
    **dispatch_options: Any,
) -> list[torch.Tensor]:
    """[T, H] of every rank."""
    ep_size = len(inputs)
    load_backend(backend)

    def work(rank: Rank) -> torch.Tensor:
        index = rank.rank()
        extra = {"allocator": allocator} if allocator else {}
        topology = Topology(ep_size=ep_size, ep_rank=index, **extra)
        local = hostile.shard(experts, ep=(ep_size, index))
        config = layer_config(experts, dtype, place=topology, activation=activation)
        info = load_backend(backend).prepare(local, config, topology)
        runner = MoeRunner(backend, a2a, config, dispatch_formats=formats)
        dispatcher = dispatcher_for(rank, config)
        x_TH, topk = inputs[index]
        result = runner.run(dispatcher.dispatch(x_TH, topk, **dispatch_options), info)
        assert not result.is_partial, "the transport completes the sum"
        out: torch.Tensor = dispatcher.combine(result)
        return out

    return run_ranks(ep_size, work)


def shape_of(rank: Rank, hidden: int) -> EpShape:
    """As the transports of these tests have it."""
    return EpShape(hidden_size=hidden, num_experts=E, top_k=K, ep_size=rank.size())


def deepep(
    rank: Rank,
    mode: DeepepMode = DeepepMode.LOW_LATENCY,
    hidden: int = 2048,
    dispatch_dtype: DispatchDtype = DispatchDtype.BF16,
    *,
    kind: type[DeepepBuffer] = DeepepBuffer,
    **options: Any,
) -> DeepepDispatcher:
    """DeepEP, or a library with its interface, with a buffer for LIMIT tokens."""
    settings = DeepepSettings(mode=mode, max_dispatch_tokens=LIMIT)
    buffer = kind(rank, settings, shape_of(rank, hidden), sends_fp8=dispatch_dtype.is_fp8)
    return DeepepDispatcher(buffer, dispatch_dtype, **options)


def worst_error(
    outputs: list[torch.Tensor],
    inputs: list[tuple[torch.Tensor, StandardTopK]],
    reference: Callable[[torch.Tensor, StandardTopK], torch.Tensor],
) -> float:
    """Largest relative error of any rank that has tokens; infinite where a number is NaN."""
    worst = 0.0
    for (x, topk), out in zip(inputs, outputs, strict=True):
        assert out.shape == x.shape
        if x.shape[0]:
            error = hostile.relative_error(out, reference(x, topk))
            worst = max(worst, error if error == error else float("inf"))
    return worst
