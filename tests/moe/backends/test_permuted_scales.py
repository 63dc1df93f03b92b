"""A scale tensor permuted on purpose stops the start: torch through the engine, others on one layer of its model."""

from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from moe import MoeA2ABackend, MoeBackend, MoeRunner, SelfCheckError, Topology
from moe.check.selfcheck import check_layer
from moe.registry import load_backend
from tests.emulators.cutlass import install_cutlass
from tests.gpu.permuted_scales import (
    MATRICES,
    NUM_LAYERS,
    ORDERS,
    TINY,
    break_prepare,
    need_named,
    permute_canonical,
    permute_processed,
    tiny_experts,
)
from tests.interpreter import SLOW_PARTS, RunInterpreted, waits_for_interpreter


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("matrix", MATRICES)
def test_the_torch_path_does_not_start(monkeypatch: pytest.MonkeyPatch, matrix: str, order: str) -> None:
    config = EngineConfig(model=TINY, device="cpu", num_pages=64, num_threads=1, selfcheck="all")
    layer = NUM_LAYERS - 1
    break_prepare(
        monkeypatch, MoeBackend.TORCH, layer, lambda experts: permute_canonical(experts, matrix, order),
        is_processed=False,
    )  # fmt: skip
    with pytest.raises(SelfCheckError) as raised:
        EngineCore(config)
    need_named(str(raised.value), MoeBackend.TORCH, layer)


@pytest.mark.parametrize("is_processed", [True, False])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("matrix", MATRICES)
def test_the_emulated_flashinfer_path_is_refused(
    monkeypatch: pytest.MonkeyPatch, matrix: str, order: str, is_processed: bool
) -> None:
    install_cutlass(monkeypatch)
    experts, config = tiny_experts(2)
    backend, topology = load_backend(MoeBackend.FLASHINFER_MXFP4), Topology()
    runner = MoeRunner(MoeBackend.FLASHINFER_MXFP4, MoeA2ABackend.NONE, config)
    info: Any = backend.prepare(experts, config, topology)
    report = check_layer(runner, info, experts, layer=2, topology=topology)
    assert 0 < report.worst_error <= report.tolerance
    if is_processed:
        info = permute_processed(info, matrix, order)
    else:
        info = backend.prepare(permute_canonical(experts, matrix, order), config, topology)
    with pytest.raises(SelfCheckError) as raised:
        check_layer(runner, info, experts, layer=2, topology=topology)
    need_named(str(raised.value), MoeBackend.FLASHINFER_MXFP4, 2)


@waits_for_interpreter
@pytest.mark.parametrize("part", SLOW_PARTS)
def test_the_interpreted_triton_path_is_refused(part: str, run_interpreted: RunInterpreted) -> None:
    told = run_interpreted("tests.moe.kernels.interpreted_selfcheck", part)
    assert 0 < told.pop("intact") < 0.015
    assert len(told) == {"pick": 3, "rest": 9}[part]
    for text in told.values():
        need_named(text, MoeBackend.TRITON, 3)
