"""The runner: resolves its path when built, refuses what cannot work, and calls the kernels only for work."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe import (
    MoeA2ABackend,
    MoeBackend,
    MoeConfigError,
    MoeRunner,
    MoeRunnerConfig,
    StandardDispatchOutput,
    StandardTopK,
    Topology,
    UnsupportedPathError,
    registry,
)
from moe.backends.deep_gemm.permutes import deep_gemm_to_standard
from moe.backends.torch.backend import TorchBackend, TorchRunnerCore, standard_to_torch
from moe.backends.triton.backend import run_standard
from moe.config import DispatchFormat
from moe.types import RunState
from tests.moe import moe_layers
from tests.moe.moe_layers import random_topk
from tests.tables import rows

E, H, I, K = 4, 64, 96, 2


EMPTY = StandardDispatchOutput(torch.empty(0, H), StandardTopK(torch.empty(0, K), torch.empty(0, K).int()))
TOKEN = StandardDispatchOutput(torch.zeros(1, H), random_topk(1, E))
EXPERTS = moe_layers.make_experts("mxfp4", E, H, I)


def make_config(**changes: object) -> MoeRunnerConfig:
    return moe_layers.make_config(EXPERTS, **({"has_biases": False} | changes))


def runner_of(config: MoeRunnerConfig) -> tuple[MoeRunner, Any]:
    return MoeRunner(MoeBackend.TORCH, MoeA2ABackend.NONE, config), TorchBackend().prepare(EXPERTS, config, Topology())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The overlap arguments of every call of the core, which fails where they are "broken"."""
    seen: list[object] = []

    def record(self: object, core_input: object, info: object, state: RunState) -> torch.Tensor:
        seen.append(state.overlap_args)
        if state.overlap_args == "broken":
            raise RuntimeError("kernel failed")
        return torch.zeros(1, H)

    monkeypatch.setattr(TorchRunnerCore, "run", record)
    return seen


def test_without_tokens_the_kernel_runs_only_where_work_overlaps_it(seen: list[object]) -> None:
    """The other work waits for what the kernel signals."""
    runner, info = runner_of(make_config())
    assert runner.run(EMPTY, info).hidden_states.shape == (0, H)
    assert seen == []
    runner.set_overlap_args("stream")
    runner.run(EMPTY, info)
    runner.run(EMPTY, info)
    assert seen == ["stream"]


def test_overlap_arguments_serve_one_run_and_are_cleared_after_a_failure(seen: list[object]) -> None:
    runner, info = runner_of(make_config())
    runner.set_overlap_args("broken")
    with pytest.raises(RuntimeError, match="kernel failed"):
        runner.run(TOKEN, info)
    runner.run(TOKEN, info)
    assert seen == ["broken", None]


def test_auto_and_foreign_formats_are_refused() -> None:
    with pytest.raises(MoeConfigError, match="needs a chosen backend; resolve 'auto' with"):
        MoeRunner(MoeBackend.AUTO, MoeA2ABackend.NONE, make_config())
    runner, info = runner_of(make_config())
    foreign: Any = SimpleNamespace(format=DispatchFormat.DEEPEP_LL, num_tokens=None)
    with pytest.raises(UnsupportedPathError, match="deepep_ll"):
        runner.run(foreign, info)


@rows("field", "no_combine", "apply_router_weight_on_input")
def test_settings_that_would_be_ignored_are_refused(field: str) -> None:
    with pytest.raises(UnsupportedPathError, match=field):
        MoeRunner(MoeBackend.TORCH, MoeA2ABackend.NONE, make_config(top_k=1, **{field: True}))


@rows(
    "changes, message",
    ({"max_num_tokens": 0}, "max_num_tokens is 0"),
    ({"apply_router_weight_on_input": True}, "top_k 1"),
)
def test_bad_settings_name_field_value_and_rule(changes: dict[str, object], message: str) -> None:
    with pytest.raises(MoeConfigError, match=message):
        make_config(**changes)


def test_nothing_is_registered_twice() -> None:
    """A second entry would silently take the first one's place."""
    registry.load_backend(MoeBackend.TORCH)
    twice: list[tuple[Any, object]] = [
        (registry.register_backend, TorchBackend),
        (registry.register_runner_core(MoeBackend.TORCH), TorchRunnerCore),
        (registry.register_pre_permute(DispatchFormat.STANDARD, MoeBackend.TORCH), standard_to_torch),
        (registry.register_post_permute(MoeBackend.DEEP_GEMM, DispatchFormat.STANDARD), deep_gemm_to_standard),
        (registry.register_fused_func(MoeA2ABackend.NONE, MoeBackend.TRITON), run_standard),
    ]
    for register, entry in twice:
        with pytest.raises(MoeConfigError, match="is registered twice"):
            register(entry)
