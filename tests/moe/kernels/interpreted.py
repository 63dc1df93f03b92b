"""Runs whole layers in Triton's interpreter, on the CPU, and prints each case's error against the twin as JSON."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from triton.runtime import interpreter

from moe import Activation, MoeA2ABackend, MoeBackend, MoeRunner, StandardDispatchOutput, StandardTopK
from moe.backends.triton.backend import TritonBackend, TritonMoeQuantInfo
from moe.backends.triton.plans import PlanTable
from moe.check.reference import reference_moe
from moe.formats import Bf16Weight, ExpertWeights, Fp8BlockWeight, Mxfp4Weight, Nvfp4Weight
from moe.formats.activation_quant import ActivationQuant, fp8_groups
from moe.kernels import launch
from moe.kernels.plan import Plan
from moe.topology import Topology
from moe.types import DeepepLlDispatchOutput, DeepepNormalDispatchOutput
from tests.moe.configs import rank_config
from tests.moe.kernels.interpreted_parts import PARTS

FORMATS = {"bf16": Bf16Weight, "fp8_block": Fp8BlockWeight, "mxfp4": Mxfp4Weight, "nvfp4": Nvfp4Weight}
GPT_OSS = Activation(alpha=1.702, beta=1.0, limit=7.0)
NUM_EXPERTS, TOP_K = 6, 2
DIRECT = Plan(is_direct=True, block_m=16, block_n_1=64, block_n_2=64, split_k=2, pdl=True)
BY_EXPERT = Plan(is_direct=True, block_m=8, block_n_1=128, block_n_2=128, by_expert=True, pdl=True)
GROUPED = Plan(is_direct=False, block_m=16, block_n_1=64, block_n_2=128, tile_group=2, pdl=True)
FP8_ACTIVATIONS = Plan(is_direct=False, block_m=16, block_n_1=64, block_n_2=64, fp8_activations=True, pdl=True)
WIDE = Plan(is_direct=False, block_m=16, block_n_1=256, block_n_2=256)
SHARED = replace(DIRECT, split_k_1=3)  # three programs for each tile of the first matrix
SHARED_BY_EXPERT = replace(BY_EXPERT, split_k_1=2)
LATE_TAIL = Plan(is_direct=True, block_m=32, block_n_1=64, block_n_2=64, split_k=2, pdl=True)  # rows beyond 16
TALL = Plan(is_direct=False, block_m=128, block_n_1=64, block_n_2=128)  # without masks
HEIGHTS = Plan(is_direct=False, block_m=32, block_n_1=64, block_n_2=64, tile_group=3, num_tile_heights=3)


def make_experts(format_name: str, hidden: int, inter: int, has_bias: bool) -> ExpertWeights:
    """Random weights that make the clamp of GPT-OSS act now and then."""
    g = torch.Generator().manual_seed(hidden + inter)
    quantize = FORMATS[format_name].quantize
    scale = 3.0 * hidden**-0.5
    w13 = quantize(torch.randn(NUM_EXPERTS, 2 * inter, hidden, generator=g) * scale)
    if isinstance(w13, Nvfp4Weight):  # gate and up are matrices of their own in a checkpoint
        w13 = replace(w13, scale_2=w13.scale_2.reshape(-1, 1) * torch.tensor([1.0, 1.5]))
    return ExpertWeights(
        w13=w13,
        w2=quantize(torch.randn(NUM_EXPERTS, hidden, inter, generator=g) * inter**-0.5),
        b13=torch.randn(NUM_EXPERTS, 2 * inter, generator=g) if has_bias else None,
        b2=torch.randn(NUM_EXPERTS, hidden, generator=g) if has_bias else None,
    )


def make_topk(num_tokens: int, top_k: int = TOP_K) -> StandardTopK:
    """Distinct experts of the first five (the last idles); some ids are -1, and one token has none at all.

    Of many tokens only a quarter may visit expert 1 and a half expert 2.
    """
    g = torch.Generator().manual_seed(num_tokens)
    ids = torch.stack([torch.randperm(NUM_EXPERTS - 1, generator=g)[:top_k] for _ in range(num_tokens)]).int()
    ids[0, 0] = -1
    if num_tokens > 2:
        ids[2] = -1
    if num_tokens > 50:
        ids[num_tokens // 4 :][ids[num_tokens // 4 :] == 1] = -1
        ids[num_tokens // 2 :][ids[num_tokens // 2 :] == 2] = -1
    return StandardTopK(torch.rand(num_tokens, top_k, generator=g), ids)


def run_case(
    format_name: str, num_tokens: int, hidden: int, inter: int, plan: Plan,
    *, ep_size: int = 1, top_k: int = TOP_K, has_bias: bool = True, is_spoilt: bool = False,
    quantize_input: ActivationQuant | None = None,
) -> float:  # fmt: skip
    """Relative error of the sum over all expert-parallel ranks; `is_spoilt`: a token ends with a NaN of its own."""
    experts, topk = make_experts(format_name, hidden, inter, has_bias), make_topk(num_tokens, top_k)
    activation = GPT_OSS if has_bias else Activation()
    x = torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(7)).bfloat16()
    if num_tokens > 4:
        x[-1] = 0  # as in the rows that fill a captured batch up: without a scale of their own
    if is_spoilt:
        x[1, -1] = float("nan")
    total = torch.zeros(num_tokens, hidden)
    for rank in range(ep_size):
        topology = Topology(ep_size=ep_size, ep_rank=rank, allocator=poisoned)
        local = topology.expert_range(NUM_EXPERTS)
        config = rank_config(
            num_experts=NUM_EXPERTS, hidden_size=hidden, intermediate_size=inter, top_k=top_k, activation=activation,
            place=topology,
        )  # fmt: skip
        info = TritonBackend().prepare(narrowed(experts, local), config, topology)
        table = PlanTable(((64, plan), (None, GROUPED)) if plan.is_direct else ((None, plan),))
        info = TritonMoeQuantInfo(layer=info.layer, plans=table, topology=topology)
        runner = MoeRunner(MoeBackend.TRITON, MoeA2ABackend.NONE, config)
        total += runner.run(StandardDispatchOutput(x, topk), info).hidden_states.float()
        if info.layer.arrived.any():  # the next launch needs them as this one found them
            return float("inf")
    want = reference_moe(x, topk, experts, activation, quantize_input=quantize_input)
    is_number = want.isfinite()
    if not torch.equal(total.isfinite(), is_number) or is_number.all() == is_spoilt:
        return float("inf")
    return float((total - want)[is_number].norm() / want[is_number].norm())


def case(*arguments: Any, is_wide: bool = False, is_hopper: bool = False, **options: Any) -> Callable[[], float]:
    """`run_case`, to be called later.

    `is_wide`: with 64-bit offsets, which only tensors of more than 2^31 numbers need. `is_hopper`: with MXFP4 steps of
    two products, which only Hopper's tiles of 16 rows and more take.
    """

    def run() -> float:
        most = 0 if is_wide else launch._INT32_MAX
        with mock.patch.multiple(launch, _INT32_MAX=most, _is_hopper=lambda device: is_hopper):
            return run_case(*arguments, **options)

    return run


def whoever_is_last(format_name: str, hidden: int, plan: Plan) -> float:
    """0 if no bit of the first matrix's results depends on which program of a tile comes last; else infinite.

    The results are not rounded to bf16 here, which would hide most of what another order of a sum changes.
    """
    experts, topk = make_experts(format_name, hidden, 96, True), make_topk(4)
    config = rank_config(num_experts=NUM_EXPERTS, hidden_size=hidden, intermediate_size=96, top_k=TOP_K)
    layer = TritonBackend().prepare(experts, config, Topology()).layer
    x = torch.randn(4, hidden, generator=torch.Generator().manual_seed(7)).bfloat16()
    forwards, backwards = (torch.zeros(4 * TOP_K, 96) for _ in range(2))
    set_grid_idx = interpreter.InterpreterBuilder.set_grid_idx

    def set_from_the_end(self: interpreter.InterpreterBuilder, x: int, y: int, z: int) -> None:
        set_grid_idx(self, x, y, self.grid_dim[2] - 1 - z)

    launch._gemm(x, topk.ids, topk.weights, layer, plan, None, forwards, is_first=True)
    with mock.patch.object(interpreter.InterpreterBuilder, "set_grid_idx", set_from_the_end):
        launch._gemm(x, topk.ids, topk.weights, layer, plan, None, backwards, is_first=True)
    return 0.0 if forwards.any() and torch.equal(forwards, backwards) else float("inf")


def run_deepep(*, is_low_latency: bool) -> float:
    """Error of one rank's answer to received rows; in low latency, rows beyond an expert's count are NaN and stay
    unwritten, and rows are further apart than they are long, as where the transport pads them.
    """
    experts = narrowed(make_experts("mxfp4", 96, 96, True), range(3, 6))
    topology = Topology(ep_size=2, ep_rank=1, allocator=poisoned)
    config = rank_config(
        num_experts=NUM_EXPERTS, hidden_size=96, intermediate_size=96, top_k=TOP_K, activation=GPT_OSS, place=topology
    )
    info = TritonBackend().prepare(experts, config, topology)
    runner = MoeRunner(MoeBackend.TRITON, MoeA2ABackend.DEEPEP, config)
    if not is_low_latency:
        x = torch.randn(9, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
        topk = make_topk(9)
        local_ids = torch.where(topk.ids >= 3, topk.ids - 3, -1).long()
        got = runner.run(DeepepNormalDispatchOutput(x, None, local_ids, topk.weights, [8, 8, 8]), info).hidden_states
    else:
        rows = torch.randn(3, 20, 128, generator=torch.Generator().manual_seed(1)).bfloat16()[..., :96]
        counts, empty = torch.tensor([20, 0, 3]), torch.empty(0, TOP_K)
        is_row = torch.arange(20) < counts[:, None]
        rows[~is_row] = float("nan")
        dispatched = DeepepLlDispatchOutput(rows, None, empty.long(), empty, counts.int(), 4, max_rows=23)
        out = runner.run(dispatched, info).hidden_states
        x, got = rows[is_row], out[is_row]
        out[is_row] = float("nan")
        if out.stride() != rows.stride() or not out.as_strided((3, 20, 128), out.stride()).isnan().all():
            return float("inf")
        ids = torch.arange(3, 6)[:, None].expand(3, 20)[is_row][:, None].int()
        topk = StandardTopK(torch.ones(ids.shape), ids)
    want = reference_moe(x, topk, experts, GPT_OSS, first_expert=3)
    return float((got.float() - want).norm() / want.norm())


def narrowed(experts: ExpertWeights, local: range) -> ExpertWeights:
    """One rank's experts."""
    w13, w2 = (w.narrow(0, local.start, len(local)) for w in (experts.w13, experts.w2))
    b13, b2 = (None if b is None else b[local.start : local.stop] for b in (experts.b13, experts.b2))
    return ExpertWeights(w13=w13, w2=w2, b13=b13, b2=b2)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """NaN wherever a kernel does not write."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


PICK = PARTS | {
    "mxfp4 direct, two parts": case("mxfp4", 3, 64, 416, DIRECT),
    "mxfp4 direct, three parts by expert": case("mxfp4", 3, 96, 416, replace(BY_EXPERT, split_k=3)),
    "mxfp4 direct, tails after the loop": case("mxfp4", 4, 192, 160, LATE_TAIL),
    "mxfp4 direct, tails and several tiles an expert": case("mxfp4", 24, 96, 160, BY_EXPERT),
    "mxfp4 one token": case("mxfp4", 1, 96, 96, DIRECT),
    "mxfp4 grouped": case("mxfp4", 26, 96, 160, GROUPED),
    "mxfp4 two tile heights": case("mxfp4", 60, 96, 96, replace(HEIGHTS, num_tile_heights=2)),
    "mxfp4 direct, one token is no number": case("mxfp4", 3, 160, 160, DIRECT, has_bias=False, is_spoilt=True),
    "mxfp4 tiles without masks, one token is no number": case(
        "mxfp4", 7, 160, 192, TALL, has_bias=False, is_spoilt=True
    ),
    "mxfp4 direct on two ranks": case("mxfp4", 4, 96, 96, DIRECT, ep_size=2),
    "deepep normal": lambda: run_deepep(is_low_latency=False),
    "deepep low latency": lambda: run_deepep(is_low_latency=True),
    "bf16 direct": case("bf16", 3, 100, 60, DIRECT),
    "bf16 grouped": case("bf16", 18, 100, 76, GROUPED),
    "fp8_block direct": case("fp8_block", 3, 192, 136, DIRECT),
    "fp8_block grouped": case("fp8_block", 18, 192, 136, GROUPED),
    "fp8_block with fp8 activations": case("fp8_block", 18, 256, 128, FP8_ACTIVATIONS, quantize_input=fp8_groups),
    "nvfp4 direct, three choices on three ranks": case("nvfp4", 6, 32, 48, BY_EXPERT, top_k=3, ep_size=3),
    "mxfp4 wide offsets": case("mxfp4", 3, 160, 96, DIRECT, is_wide=True),
    "mxfp4 grouped, wide offsets": case("mxfp4", 9, 96, 96, HEIGHTS, is_wide=True),
    "fp8_block in wide tiles": case("fp8_block", 5, 384, 128, WIDE),
    "nvfp4 grouped": case("nvfp4", 18, 96, 48, GROUPED),
    "mxfp4 direct as on Hopper": case("mxfp4", 3, 320, 416, DIRECT, is_hopper=True),
    "mxfp4 grouped as on Hopper": case("mxfp4", 26, 160, 192, HEIGHTS, is_hopper=True),
    "nvfp4 direct, half a step left": case("nvfp4", 3, 160, 224, DIRECT),
    "whoever is last": lambda: whoever_is_last("bf16", 200, SHARED),
    "bf16 direct, shared tiles": case("bf16", 3, 200, 60, SHARED),
    "fp8_block by expert, several shared tiles of two halves": case("fp8_block", 13, 320, 72, SHARED_BY_EXPERT),
    "mxfp4 by expert, shared tiles and a tail": case("mxfp4", 3, 416, 96, SHARED_BY_EXPERT),
    "nvfp4 direct, shared tiles, three choices on three ranks": case("nvfp4", 3, 224, 48, SHARED, top_k=3, ep_size=3),
}
REST = {  # sizes of real models, and more of what the pick has once
    "mxfp4 direct": case("mxfp4", 3, 192, 160, DIRECT),
    "mxfp4 direct by expert": case("mxfp4", 5, 160, 96, BY_EXPERT),
    "mxfp4 plain activation": case("mxfp4", 3, 96, 96, DIRECT, has_bias=False),
    "fp8_block with fp8 activations at 192 and 136": case(
        "fp8_block", 18, 192, 136, FP8_ACTIVATIONS, quantize_input=fp8_groups
    ),
    "nvfp4 direct": case("nvfp4", 3, 96, 80, DIRECT),
    "mxfp4 direct, three parts, three choices on two ranks": case(
        "mxfp4", 3, 160, 448, replace(DIRECT, block_m=8, split_k=3), top_k=3, ep_size=2
    ),
    "mxfp4 direct with several tiles an expert": case("mxfp4", 24, 96, 96, BY_EXPERT),
    "mxfp4 three tile heights": case("mxfp4", 90, 160, 192, HEIGHTS),
    "mxfp4 tiles without masks": case("mxfp4", 9, 160, 192, TALL),
    "mxfp4 tiles without masks on two ranks": case("mxfp4", 9, 192, 96, TALL, ep_size=2),
    "mxfp4 grouped on two ranks": case("mxfp4", 19, 160, 96, GROUPED, ep_size=2),
    "mxfp4 direct, several late tiles, three choices": case(
        "mxfp4", 60, 64, 320, replace(LATE_TAIL, by_expert=True), top_k=3
    ),
    "mxfp4 direct at 2880": case("mxfp4", 1, 2880, 192, DIRECT),
    "mxfp4 grouped at 1440": case("mxfp4", 3, 192, 1440, GROUPED),
    "mxfp4 tiles without masks as on Hopper": case("mxfp4", 9, 160, 192, TALL, is_hopper=True),
    "mxfp4 grouped at 384 and 288": case("mxfp4", 19, 384, 288, GROUPED),
    "bf16 direct at 288 and 192": case("bf16", 5, 288, 192, DIRECT),
    "fp8_block direct at 1440": case("fp8_block", 2, 1440, 192, DIRECT),
    "nvfp4 grouped at 384": case("nvfp4", 7, 192, 384, GROUPED),
    "fp8_block direct, shared tiles": case("fp8_block", 3, 400, 136, SHARED),
    "mxfp4 direct, shared tiles without a tail on two ranks": case("mxfp4", 5, 384, 96, SHARED, ep_size=2),
    "mxfp4 by expert, several shared tiles and tails": case("mxfp4", 24, 416, 160, SHARED_BY_EXPERT),
    "whoever is last of two halves": lambda: whoever_is_last("fp8_block", 400, replace(SHARED_BY_EXPERT, split_k_1=3)),
    "mxfp4 shared tiles and late tails": case("mxfp4", 4, 416, 96, replace(LATE_TAIL, split_k_1=3)),
    "mxfp4 shared tiles as on Hopper, one token is no number": case(
        "mxfp4", 3, 416, 160, SHARED, has_bias=False, is_spoilt=True, is_hopper=True
    ),
    "mxfp4 shared tiles, wide offsets": case("mxfp4", 3, 416, 96, SHARED, is_wide=True),
    "bf16 shared tiles without early starts": case("bf16", 3, 200, 60, replace(SHARED, pdl=False)),
}

if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)  # and so what `torch.empty` returns is NaN
    json.dump({name: run() for name, run in (REST if sys.argv[1] == "rest" else PICK).items()}, sys.stdout)
