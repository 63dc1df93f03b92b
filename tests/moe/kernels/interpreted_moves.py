"""Experts of our own kernels that change places between two ranks, in Triton's interpreter; prints errors as JSON."""

import json

import torch

from moe import StandardTopK
from moe.backends.triton.backend import TritonBackend, run_standard
from moe.check.reference import reference_moe
from moe.formats import Mxfp4Weight
from moe.topology import Topology
from moe.types import RunState, StandardDispatchOutput
from tests.moe.configs import rank_config
from tests.moe.kernels.interpreted import GPT_OSS, NUM_EXPERTS, TOP_K, make_experts, make_topk, narrowed

BACKEND = TritonBackend()
SIZE, NUM_LOCAL = 64, NUM_EXPERTS // 2
PLACE = torch.tensor([0, 5, 2, 3, 4, 1], dtype=torch.int32)  # experts 1 and 5 change places


def error_of(format_name: str) -> float:
    experts = make_experts(format_name, SIZE, SIZE, has_bias=True)
    if isinstance(experts.w13, Mxfp4Weight):
        experts.w13.scales[NUM_LOCAL:] -= 9
    infos, configs = [], []
    for rank in range(2):
        topology = Topology(ep_size=2, ep_rank=rank)
        configs.append(rank_config(
            num_experts=NUM_EXPERTS, hidden_size=SIZE, intermediate_size=SIZE, top_k=TOP_K, place=topology.place,
            activation=GPT_OSS, has_biases=True,
        ))  # fmt: skip
        infos.append(BACKEND.prepare(narrowed(experts, topology.expert_range(NUM_EXPERTS)), configs[-1], topology))
    parts = [
        [part.clone() for part in BACKEND.expert_parts(info, slot)] for info, slot in ((infos[0], 1), (infos[1], 2))
    ]
    BACKEND.put_expert(infos[0], 1, parts[1])
    BACKEND.put_expert(infos[1], 2, parts[0])
    x, topk = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1)).bfloat16(), make_topk(4)
    moved = StandardTopK(topk.weights, torch.where(topk.ids < 0, -1, PLACE[topk.ids.clamp_min(0)]))
    got = sum(
        run_standard(StandardDispatchOutput(x, moved), info, config, RunState()).hidden_states.float()
        for info, config in zip(infos, configs, strict=True)
    )
    want = reference_moe(x, topk, experts, GPT_OSS)
    return float((got - want).norm() / want.norm())


if __name__ == "__main__":
    print(json.dumps({format_name: error_of(format_name) for format_name in ("mxfp4", "nvfp4")}))
