"""Runs one MoE layer on several emulated ranks: dispatch, the runner, combine. Every rank has its own tokens."""

from collections.abc import Callable
from typing import Any

import torch

from moe import Activation, MoeA2ABackend, MoeBackend, MoeRunner, MoeRunnerConfig, StandardTopK, Topology
from moe.config import DispatchFormat
from moe.formats import ExpertWeights
from moe.registry import load_backend
from tests.emulators.ranks import Rank, run_ranks
from tests.moe.backends import hostile
from tests.moe.configs import rank_config

E, I, K = 8, 64, 3
PLAIN = Activation()


def layer_config(experts: ExpertWeights, dtype: torch.dtype, **changes: object) -> MoeRunnerConfig:
    """Of a layer with as many experts; at another `place` than alone, these are those of all expert-parallel ranks."""
    settings: dict[str, object] = {
        "num_experts": experts.num_experts, "hidden_size": experts.hidden_size,
        "intermediate_size": experts.intermediate_size, "top_k": K, "dtype": dtype,
    }  # fmt: skip
    return rank_config(**(settings | changes))  # type: ignore[arg-type]


def rank_inputs(num_tokens: list[int], hidden: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, StandardTopK]]:
    """Different tokens and routing on every rank, with -1 ids; a rank may have none."""
    return [
        (
            hostile.tokens(count, hidden, seed=10 + rank, size=3.0).to(dtype),
            hostile.routing(count, E, K, seed=20 + rank),
        )
        for rank, count in enumerate(num_tokens)
    ]


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
