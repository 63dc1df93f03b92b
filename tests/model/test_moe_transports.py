"""MoE layers built for a transport on two emulated ranks: settings alone give path, dispatch dtype and checks."""

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from model.config import ModelSettings
from model.families.base import MoeParts
from model.linear import GatedMlp
from model.moe_build import MoeBuilder
from model.moe_layer import MoeLayer
from model.parallel import ParallelLayout
from moe import (
    Activation,
    ExpertShape,
    MoeA2ABackend,
    MoeBackend,
    MoeRunner,
    MoeRunnerConfig,
    RoutingConfig,
    RoutingMethod,
    SelfCheckError,
    Topology,
)
from moe.backends.flashinfer.cutedsl import CuteDslFp4MoeQuantInfo
from moe.check.reference import reference_moe
from moe.device import Device
from moe.dispatch.deepep_settings import DeepepMode, DeepepSettings
from moe.errors import MoeConfigError
from moe.formats import ExpertWeights
from moe.group import RankGroups
from moe.registry import load_backend
from moe.routing import route
from tests.emulators.alltoall import install_alltoall
from tests.emulators.cutedsl import install_cutedsl
from tests.emulators.deep_gemm import install_deep_gemm
from tests.emulators.deepep import install_deepep
from tests.emulators.ranks import Rank, run_ranks
from tests.moe.backends import hostile
from tests.tables import rows

E, K, H, I, LIMIT = 8, 3, 2048, 128, 64
ROUTING = RoutingConfig(
    method=RoutingMethod.SIGMOID_GROUPED, num_experts=E, top_k=K, num_groups=4, num_kept_groups=2,
    routed_scaling_factor=2.5,
)  # fmt: skip
SHAPE = ExpertShape(num_experts=E, top_k=ROUTING.top_k, hidden_size=H, intermediate_size=I)
LAYER = MoeRunnerConfig(shape=SHAPE, routing=ROUTING)
TOKENS = [hostile.tokens(count, H, seed=30 + count, size=1.0) for count in (5, 9)]
DEEPEP, FLASHINFER = MoeA2ABackend.DEEPEP, MoeA2ABackend.FLASHINFER


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is asked for and what must come of it."""

    name: str
    backend: MoeBackend
    a2a: MoeA2ABackend = DEEPEP
    mode: DeepepMode = DeepepMode.LOW_LATENCY
    arch: str = "cpu"
    sends_nvfp4: bool = False
    dispatch_dtype: str = "bf16"
    tolerance: float = 2e-2

    def __str__(self) -> str:
        return f"{self.backend}-{self.a2a}-{self.mode}-{self.dispatch_dtype}"


CASES = [
    *(Case(name="bf16", backend=MoeBackend.TORCH, mode=mode) for mode in DeepepMode),
    *(
        Case(name="fp8_block", backend=MoeBackend.DEEP_GEMM, mode=mode, arch="sm90", dispatch_dtype="fp8")
        for mode in (DeepepMode.LOW_LATENCY, DeepepMode.AUTO)
    ),
    Case(name="fp8_block", backend=MoeBackend.DEEP_GEMM, arch="sm100", dispatch_dtype="fp8_ue8m0", tolerance=0.15),
    Case(name="nvfp4", backend=MoeBackend.FLASHINFER_CUTEDSL, arch="sm100"),
    Case(
        name="nvfp4", backend=MoeBackend.FLASHINFER_CUTEDSL, arch="sm100", sends_nvfp4=True, dispatch_dtype="nvfp4"
    ),
    Case(
        name="nvfp4", backend=MoeBackend.FLASHINFER_CUTEDSL, a2a=FLASHINFER, arch="sm100", dispatch_dtype="nvfp4"
    ),
]  # fmt: skip


def install(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Emulators for the case; one rank at a time in the experts, since the ranks share one emulated kernel."""
    run, turn = MoeRunner.run, threading.Lock()

    def run_alone(*arguments: Any) -> Any:
        with turn:
            return run(*arguments)

    monkeypatch.setattr(MoeRunner, "run", run_alone)
    monkeypatch.setattr("moe.choose.select.probe_device", lambda device: Device(arch=case.arch))
    if case.backend is MoeBackend.DEEP_GEMM:
        install_deep_gemm(monkeypatch, case.arch)
    if case.backend is MoeBackend.FLASHINFER_CUTEDSL:
        install_cutedsl(monkeypatch)
    if case.a2a is FLASHINFER:
        install_alltoall(monkeypatch)
    install_deepep(monkeypatch, nvfp4=case.sends_nvfp4)


def parts() -> MoeParts:
    g = torch.Generator().manual_seed(9)
    shared = (torch.randn(size, generator=g) / 40 for size in ((64, H), (64, H), (H, 64)))
    return MoeParts(
        gate_weight_EH=torch.randn(E, H, generator=g) / 40,
        correction_bias_E=torch.randn(E, generator=g) / 8,
        shared_experts=GatedMlp(*(weight.bfloat16() for weight in shared)),
    )


def build(case: Case, experts: ExpertWeights, rank: Rank, **changes: Any) -> MoeLayer:
    choices: dict[str, Any] = {"moe_backend": case.backend, "moe_a2a_backend": case.a2a} | changes
    settings = ModelSettings(
        dtype=torch.bfloat16, selfcheck="all", max_num_tokens=LIMIT,
        layout=ParallelLayout(dp_size=rank.size(), ep_size=rank.size(), rank=rank.rank()),
        deepep=DeepepSettings(mode=case.mode, max_dispatch_tokens=LIMIT), **choices,
    )  # fmt: skip
    builder = MoeBuilder(settings=settings, layer=LAYER, groups=RankGroups(world=rank))  # type: ignore[arg-type]
    builder.resolve(3, case.name)
    builder.connect()
    local = hostile.shard(experts, ep=(rank.size(), rank.rank()))
    return builder.build(3, parts(), lambda: hostile.with_layer_scales(local, experts))


def reference(case: Case, layer: MoeLayer, experts: ExpertWeights, x: torch.Tensor) -> torch.Tensor:
    """All experts by the reference, with the path's rounding of inputs, and the shared experts."""
    backend = load_backend(case.backend)
    whole = backend.as_computed(hostile.with_layer_scales(experts, experts), Topology(a2a=case.a2a))
    topk = route(layer.gate(x), layer.routing, layer.correction_bias_E)
    rounding = backend.formats[case.name].activation_quant
    assert layer.shared_experts is not None
    return reference_moe(x, topk, whole, Activation(), quantize_input=rounding) + layer.shared_experts(x).float()


@rows("case", *CASES)
def test_two_ranks_equal_one(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    experts = hostile.quantized_experts(case.name, E, H, I, x=torch.cat(TOKENS))
    install(monkeypatch, case)

    def work(rank: Rank) -> tuple[torch.Tensor, MoeLayer]:
        index = rank.rank()
        layer = build(case, experts, rank)
        return layer(TOKENS[index]).float(), layer

    for x, (got, layer) in zip(TOKENS, run_ranks(2, work), strict=True):
        assert hostile.relative_error(got, reference(case, layer, experts, x)) < case.tolerance
        assert layer.description == f"layer 3: {case.backend} / {case.a2a} / {case.name}"
        assert layer.selfcheck.worst_error <= layer.selfcheck.tolerance
        assert layer.quant_info.topology.dispatch_dtype == case.dispatch_dtype
        if isinstance(layer.quant_info, CuteDslFp4MoeQuantInfo):
            assert layer.quant_info.use_nvfp4_dispatch == (case.dispatch_dtype == "nvfp4" and case.a2a is DEEPEP)


@rows("is_decode", False, True)
def test_auto_mode_follows_the_step(monkeypatch: pytest.MonkeyPatch, is_decode: bool) -> None:
    """Decode steps take the low-latency kernels, any other step the normal ones; the answer is the same."""
    case = next(case for case in CASES if case.mode is DeepepMode.AUTO and case.backend is MoeBackend.TORCH)
    experts = hostile.quantized_experts(case.name, E, H, I, x=torch.cat(TOKENS))
    install(monkeypatch, case)

    def work(rank: Rank) -> tuple[torch.Tensor, MoeLayer, list[str]]:
        layer = build(case, experts, rank)
        runner_run, formats = layer.runner.run, []
        layer.runner.run = lambda dispatched, info: (  # type: ignore[method-assign]
            formats.append(str(dispatched.format)) or runner_run(dispatched, info)
        )
        return layer(TOKENS[rank.rank()], is_decode=is_decode).float(), layer, formats

    for x, (got, layer, formats) in zip(TOKENS, run_ranks(2, work), strict=True):
        assert formats == ["deepep_ll" if is_decode else "deepep_normal"]
        assert hostile.relative_error(got, reference(case, layer, experts, x)) < case.tolerance


def test_rows_that_the_experts_kernel_cannot_tile_are_refused_before_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.backend is MoeBackend.FLASHINFER_CUTEDSL and case.a2a is DEEPEP)
    install(monkeypatch, case)
    monkeypatch.setitem(globals(), "LIMIT", 32)
    experts = hostile.quantized_experts(case.name, E, H, I, x=torch.cat(TOKENS))
    with pytest.raises(MoeConfigError, match="is 32: times 2 ranks it must be a multiple of 128"):
        run_ranks(2, lambda rank: build(case, experts, rank))


def test_a_transport_that_loses_tokens_stops_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[0]
    library = install_deepep(monkeypatch)
    original = library.combine
    monkeypatch.setattr(
        library, "combine", lambda self, x, handle: (original(self, x.roll(1, 0), handle)[0], None, None)
    )
    experts = hostile.quantized_experts(case.name, E, H, I, x=torch.cat(TOKENS))
    with pytest.raises(SelfCheckError, match="transport deepep"):
        run_ranks(2, lambda rank: build(case, experts, rank))


def test_a_layer_goes_on_after_its_experts_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: one rank's experts raise twice; the other sees NaN for their part, and the next step is right on both."""
    case = CASES[0]
    experts = hostile.quantized_experts(case.name, E, H, I, x=torch.cat(TOKENS))
    install(monkeypatch, case)

    def work(rank: Rank) -> tuple[torch.Tensor, torch.Tensor, MoeLayer]:
        x, layer = TOKENS[rank.rank()], build(case, experts, rank)
        run = layer.runner.run
        for _ in range(3):
            if rank.rank() == 0:
                layer.runner.run = lambda dispatched, info: 1 / 0  # type: ignore[method-assign, assignment, return-value]
                with pytest.raises(ZeroDivisionError):
                    layer(x)
                layer.runner.run = run  # type: ignore[method-assign]
            else:
                poisoned = layer(x)
        return layer(x).float(), poisoned if rank.rank() else x, layer

    results = run_ranks(2, work)
    for x, (got, _, layer) in zip(TOKENS, results, strict=True):
        assert hostile.relative_error(got, reference(case, layer, experts, x)) < case.tolerance
    assert results[1][1].isnan().any()
