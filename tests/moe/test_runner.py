"""The runner: resolves its path when built, refuses what cannot work, and computes what the formula says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe import (
    MoeA2ABackend,
    MoeBackend,
    MoeConfigError,
    MoeRunner,
    MoeRunnerConfig,
    RankPlace,
    RoutingConfig,
    RoutingMethod,
    StandardDispatchOutput,
    StandardTopK,
    Topology,
    UnsupportedPathError,
)
from moe.backends.deep_gemm.permutes import deep_gemm_to_standard
from moe.backends.torch.backend import TorchBackend, TorchRunnerCore, standard_to_torch
from moe.backends.triton.backend import run_standard
from moe.config import DispatchFormat
from moe.formats import ExpertWeights
from moe.registry import (
    load_backend,
    register_backend,
    register_fused_func,
    register_post_permute,
    register_pre_permute,
    register_runner_core,
)
from tests.moe import moe_layers
from tests.moe.moe_layers import random_topk
from tests.tables import rows

E, H, I, K = 4, 64, 96, 2


def make_config(**changes: object) -> MoeRunnerConfig:
    return moe_layers.make_config(make_experts(), **({"has_biases": False} | changes))


def make_experts() -> ExpertWeights:
    return moe_layers.make_experts("mxfp4", E, H, I)


def expected(x: torch.Tensor, topk: StandardTopK, experts: ExpertWeights) -> torch.Tensor:
    w13, w2 = experts.w13.dequantize(), experts.w2.dequantize()
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for expert, weight in zip(topk.ids[t].tolist(), topk.weights[t], strict=True):
            if expert < 0:
                continue
            gate, up = (w13[expert] @ x[t] + experts.b13[expert]).chunk(2)
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            out[t] += weight * (w2[expert] @ (gate * torch.sigmoid(1.702 * gate) * (up + 1)) + experts.b2[expert])
    return out


def test_torch_path_computes_the_formula_and_skips_minus_one() -> None:
    config, experts = make_config(), make_experts()
    topk = random_topk(7, E)
    topk.ids[2, 1] = -1
    topk.ids[3] = -1
    x = torch.randn(7, H)
    quant_info = TorchBackend().prepare(experts, config, Topology())
    runner = MoeRunner(MoeBackend.TORCH, MoeA2ABackend.NONE, config)
    result = runner.run(StandardDispatchOutput(x, topk), quant_info)
    want = expected(x, topk, experts)
    assert (result.hidden_states - want).norm() / want.norm() < 1e-5
    assert torch.equal(result.hidden_states[3], torch.zeros(H))
    assert not result.is_partial


def test_no_tokens_means_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    runner = MoeRunner(MoeBackend.TORCH, MoeA2ABackend.NONE, config)
    monkeypatch.setattr("moe.backends.torch.backend.TorchRunnerCore.run", lambda *a: pytest.fail("the core was called"))
    empty = StandardDispatchOutput(torch.empty(0, H), StandardTopK(torch.empty(0, K), torch.empty(0, K).int()))
    assert runner.run(empty, TorchBackend().prepare(make_experts(), config, Topology())).hidden_states.shape == (0, H)


def test_without_tokens_the_kernel_still_runs_where_work_overlaps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other work waits for what the kernel signals."""
    config, seen = make_config(), []

    def record(self: object, core_input: object, info: object, state: object) -> torch.Tensor:
        seen.append(state.overlap_args)  # type: ignore[attr-defined]
        return torch.zeros(0, H)

    monkeypatch.setattr("moe.backends.torch.backend.TorchRunnerCore.run", record)
    runner = MoeRunner(MoeBackend.TORCH, MoeA2ABackend.NONE, config)
    empty = StandardDispatchOutput(torch.empty(0, H), StandardTopK(torch.empty(0, K), torch.empty(0, K).int()))
    quant_info = TorchBackend().prepare(make_experts(), config, Topology())
    runner.set_overlap_args("stream")
    runner.run(empty, quant_info)
    runner.run(empty, quant_info)
    assert seen == ["stream"]


def test_overlap_arguments_serve_one_run_and_are_cleared_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    seen = []
    quant_info = TorchBackend().prepare(make_experts(), config, Topology())

    def record(self: object, core_input: object, info: object, state: object) -> torch.Tensor:
        seen.append(state.overlap_args)  # type: ignore[attr-defined]
        if len(seen) == 1:
            raise RuntimeError("kernel failed")
        return torch.zeros(1, H)

    monkeypatch.setattr("moe.backends.torch.backend.TorchRunnerCore.run", record)
    runner = MoeRunner(MoeBackend.TORCH, MoeA2ABackend.NONE, config)
    dispatched = StandardDispatchOutput(torch.zeros(1, H), random_topk(1, E))
    runner.set_overlap_args("stream")
    with pytest.raises(RuntimeError, match="kernel failed"):
        runner.run(dispatched, quant_info)
    runner.run(dispatched, quant_info)
    assert seen == ["stream", None]


def test_impossible_pair_is_refused_when_built_and_names_what_works() -> None:
    with pytest.raises(UnsupportedPathError) as error:
        MoeRunner(MoeBackend.TORCH, MoeA2ABackend.MORI, make_config())
    text = str(error.value)
    assert "--moe-backend torch" in text
    assert "--moe-a2a-backend mori" in text
    assert "works with --moe-a2a-backend none" in text


def test_auto_and_foreign_formats_are_refused() -> None:
    with pytest.raises(MoeConfigError, match="auto"):
        MoeRunner(MoeBackend.AUTO, MoeA2ABackend.NONE, make_config())
    runner = MoeRunner(MoeBackend.TORCH, MoeA2ABackend.NONE, make_config())

    class Foreign:
        format = DispatchFormat.DEEPEP_LL
        num_tokens = None

    with pytest.raises(UnsupportedPathError, match="deepep_ll"):
        runner.run(Foreign(), None)  # type: ignore[arg-type]


@rows("field", "no_combine", "apply_router_weight_on_input")
def test_settings_that_would_be_ignored_are_refused(field: str) -> None:
    with pytest.raises(UnsupportedPathError, match=field):
        MoeRunner(MoeBackend.TORCH, MoeA2ABackend.NONE, make_config(top_k=1, **{field: True}))


def routing_of(num_experts: int, top_k: int) -> RoutingConfig:
    return RoutingConfig(method=RoutingMethod.SOFTMAX_AFTER_TOPK, num_experts=num_experts, top_k=top_k)


@rows(
    "changes, message",
    ({"num_experts": 0}, "num_experts is 0"),
    ({"hidden_size": 0}, "hidden_size is 0"),
    ({"max_num_tokens": 0}, "max_num_tokens is 0"),
    ({"place": RankPlace(ep_size=3)}, "ep_size is 3: it must divide the 4 experts"),
    ({"top_k": 9}, "top_k is 9"),
    ({"routing": routing_of(8, K)}, "num_experts is 4 .* but 8 in its routing"),
    ({"routing": routing_of(E, 1)}, "top_k is 2 .* but 1 in its routing"),
    ({"apply_router_weight_on_input": True}, "top_k 1"),
)
def test_bad_settings_name_field_value_and_rule(changes: dict[str, object], message: str) -> None:
    with pytest.raises(MoeConfigError, match=message):
        make_config(**changes)


def test_nothing_is_registered_twice() -> None:
    """A second entry would silently take the first one's place."""
    load_backend(MoeBackend.TORCH)
    twice: list[tuple[Callable[[Any], object], object]] = [
        (register_backend, TorchBackend),
        (register_runner_core(MoeBackend.TORCH), TorchRunnerCore),
        (register_pre_permute(DispatchFormat.STANDARD, MoeBackend.TORCH), standard_to_torch),
        (register_post_permute(MoeBackend.DEEP_GEMM, DispatchFormat.STANDARD), deep_gemm_to_standard),
        (register_fused_func(MoeA2ABackend.NONE, MoeBackend.TRITON), run_standard),
    ]
    for register, entry in twice:
        with pytest.raises(MoeConfigError, match="is registered twice"):
            register(entry)
