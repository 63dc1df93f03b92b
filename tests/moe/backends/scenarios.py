"""One scenario per FlashInfer path: every rank of a small deployment runs, results are summed, the error returned.

The mutation tests plant a fault and demand that the scenario's error, or a refusal, shows it.
"""

import functools
from dataclasses import dataclass

import pytest
import torch

from moe import Activation, BypassedTopK, MoeA2ABackend, MoeBackend, MoeRunner, StandardDispatchOutput, Topology
from moe.config import RoutingConfig, RoutingMethod
from moe.formats import ExpertWeights
from moe.registry import load_backend
from moe.routing import StandardTopK, TopKOutput, route
from tests.emulators.cutedsl import install_cutedsl
from tests.emulators.cutlass import install_cutlass
from tests.emulators.trtllm import install_trtllm
from tests.moe.backends import cutedsl_cases, hostile

E, K, T = 8, 2, 23
GPT_OSS = Activation(alpha=1.702, beta=1.0, limit=7.0)
RULES = RoutingConfig(
    method=RoutingMethod.SIGMOID_GROUPED, num_experts=E, top_k=K, num_groups=4, num_kept_groups=2,
    routed_scaling_factor=hostile.FACTOR,
)  # fmt: skip
PATHS = (
    "mxfp4-sm90", "mxfp4-sm100", "cutlass-bf16", "cutlass-fp8_block", "cutlass-fp8_tensor", "cutlass-nvfp4",
    "trtllm-fp8_block", "trtllm-fp8_tensor", "trtllm-nvfp4", "cutedsl-v1", "cutedsl-v2",
)  # fmt: skip
BACKENDS = {
    "mxfp4": MoeBackend.FLASHINFER_MXFP4, "cutlass": MoeBackend.FLASHINFER_CUTLASS,
    "trtllm": MoeBackend.FLASHINFER_TRTLLM, "cutedsl": MoeBackend.FLASHINFER_CUTEDSL,
}  # fmt: skip


def tolerance(path: str) -> float:
    """The issue's bound: weight-only paths and those that quantize activations alike."""
    return 1e-5 if path.startswith("mxfp4") or path.endswith("bf16") else 1e-3


def install(monkeypatch: pytest.MonkeyPatch, path: str) -> object:
    """The emulator behind a path."""
    if path == "mxfp4-sm100" or path.startswith("trtllm"):
        return install_trtllm(monkeypatch)
    if path.startswith("cutedsl"):
        return install_cutedsl(monkeypatch)
    return install_cutlass(monkeypatch, *((10, 0) if path == "cutlass-nvfp4" else (9, 0)))


@dataclass(frozen=True, slots=True)
class Problem:
    """One layer of a path with its tokens and the twin's answer."""

    path: str
    experts: ExpertWeights
    activation: Activation
    x: torch.Tensor
    topk: TopKOutput
    want: torch.Tensor


def run_scenario(emulator: object, path: str) -> float:
    """Relative error of the sum over ranks against the twin."""
    return _run_v1(emulator) if path == "cutedsl-v1" else run_ranks(emulator, make_problem(path), 2, 2)


def prepare(path: str) -> None:
    """Make the path's layer and answer. Before a fault is planted: in shared code it could move both sides."""
    if path == "cutedsl-v1":
        cutedsl_cases.expected_v1(cutedsl_cases.make_experts())
    else:
        make_problem(path)


@functools.cache
def make_problem(path: str) -> Problem:
    """A layer of every path but v1."""
    family, kind = path.split("-")
    experts, activation, x = _layer(family, kind)
    standard = hostile.routing(T, E, K)
    topk: TopKOutput = standard
    if family == "trtllm":
        logits = torch.randn(T, E, generator=torch.Generator().manual_seed(5)).bfloat16()
        topk = BypassedTopK(logits, RULES, (torch.arange(E) * 0.0625 - 0.25).flip(0))
        routed = route(logits, RULES, topk.correction_bias)
        standard = StandardTopK(routed.weights.bfloat16().float(), routed.ids)
    want = hostile.reference(x, standard, hostile.layer_wide(experts), activation)
    return Problem(path, experts, activation, x, topk, want)


def block_of(path: str) -> int:
    """Shards of a path's intermediate axis are whole multiples of this."""
    return {"mxfp4": 32, "trtllm": 128, "cutedsl": 64}.get(path.partition("-")[0], 128)


def run_ranks(emulator: object, problem: Problem, tp_size: int, ep_size: int) -> float:
    """Relative error of the sum over `tp_size` x `ep_size` ranks against the twin; each rank knows that it is one."""
    backend = BACKENDS[problem.path.partition("-")[0]]
    x, total = problem.x, torch.zeros_like(problem.want)
    for ep_rank in range(ep_size):
        for tp_rank in range(tp_size):
            topology = Topology(tp_size=tp_size, tp_rank=tp_rank, ep_size=ep_size, ep_rank=ep_rank)
            part = hostile.shard(
                problem.experts, tp=(tp_size, tp_rank), ep=(ep_size, ep_rank), block=block_of(problem.path)
            )
            part = hostile.with_layer_scales(part, problem.experts)
            config = hostile.make_config(
                E, x.shape[1], part.intermediate_size, K, place=topology, activation=problem.activation
            )  # fmt: skip
            info = load_backend(backend).prepare(part, config, topology)
            runner = MoeRunner(backend, MoeA2ABackend.NONE, config)
            result = runner.run(StandardDispatchOutput(x, problem.topk), info)
            assert result.is_partial == (tp_size * ep_size > 1), "exactly one place reduces, and knows when"
            total += emulator.exact[:, : x.shape[1]]  # type: ignore[attr-defined]
    return hostile.relative_error(total, problem.want)


def _layer(family: str, kind: str) -> tuple[ExpertWeights, Activation, torch.Tensor]:
    if family == "mxfp4":
        return hostile.plain_experts("mxfp4", E, 192, 288, has_biases=True), GPT_OSS, hostile.tokens(T, 192, size=6.0)
    x = hostile.tokens(T, 256, size=3.0)
    if kind == "bf16":
        return hostile.plain_experts(kind, E, 256, 256, has_biases=True, size=2.0), GPT_OSS, x
    name = "nvfp4" if kind == "v2" else kind
    return hostile.quantized_experts(name, E, 256, 256, x=x), Activation(), x


def _run_v1(emulator: object) -> float:
    experts = cutedsl_cases.make_experts()
    want = cutedsl_cases.expected_v1(experts)
    total = torch.zeros_like(want)
    for rank in range(2):
        topology = Topology(ep_size=2, ep_rank=rank, a2a=MoeA2ABackend.DEEPEP)
        part = hostile.with_layer_scales(hostile.shard(experts, ep=(2, rank)), experts)
        config = cutedsl_cases.config_for(part, topology)
        info = load_backend(MoeBackend.FLASHINFER_CUTEDSL).prepare(part, config, topology)
        own = range(rank * E // 2, (rank + 1) * E // 2)
        slots, masked_m, origin = cutedsl_cases.low_latency_slots(cutedsl_cases.TOPK, own)
        result = cutedsl_cases.v1_runner(config).run(cutedsl_cases.dispatch_ll(slots, masked_m), info)
        weights = StandardTopK(result.topk_weights, cutedsl_cases.TOPK.ids)  # type: ignore[attr-defined]
        total += cutedsl_cases.combine(emulator.exact, weights, origin)  # type: ignore[attr-defined]
    return hostile.relative_error(total, want)
