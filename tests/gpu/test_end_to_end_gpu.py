"""The bundled model on a card with every backend: the start-up self-check passes, and scales that were permuted on
purpose stop the start. The answers over HTTP are compared by `scripts/card_end_to_end.py`.
"""

from collections.abc import Callable
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from moe import MoeBackend, SelfCheckError
from tests.engine.requests import request, run_all, tokens_of
from tests.gpu.permuted_scales import (
    MATRICES,
    NUM_LAYERS,
    ORDERS,
    TINY,
    break_prepare,
    need_named,
    permute_canonical,
    permute_processed,
    permute_tail,
)

pytestmark = pytest.mark.gpu
BACKENDS = (MoeBackend.TORCH, MoeBackend.TRITON, MoeBackend.FLASHINFER_MXFP4)


def config(backend: MoeBackend) -> EngineConfig:
    return EngineConfig(
        model=TINY, device="cuda", moe_backend=backend.value, selfcheck="all", num_pages=64, max_model_len=256
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_layer_passes_its_check_and_says_its_path(backend: MoeBackend) -> None:
    core = EngineCore(config(backend))
    assert core.info.moe_paths == [f"layer {layer}: {backend} / none / mxfp4" for layer in range(NUM_LAYERS)]
    assert [check.layer for check in core.info.selfcheck] == list(range(NUM_LAYERS))
    for check in core.info.selfcheck:
        assert check.path == f"{backend}/none/mxfp4"
        assert 0 < check.worst_error <= check.tolerance <= 0.05
    answers = run_all(core, [request(str(n), range(100, 100 + n), 8, ignore_eos=True) for n in (3, 17, 90)])
    assert [len(tokens_of(outputs)) for outputs in answers.values()] == [8, 8, 8]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize(
    ("backend", "permute"),
    [
        *[(backend, permute_canonical) for backend in BACKENDS],
        (MoeBackend.TRITON, permute_processed),
        (MoeBackend.TRITON, permute_tail),
        (MoeBackend.FLASHINFER_MXFP4, permute_processed),
    ],
)
def test_a_permuted_scale_tensor_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, backend: MoeBackend, permute: Callable[..., Any], matrix: str, order: str
) -> None:
    """In the fourth layer only, so that the message's layer is not the first one's by chance."""
    is_processed = permute is not permute_canonical
    break_prepare(monkeypatch, backend, 3, lambda weights: permute(weights, matrix, order), is_processed=is_processed)
    with pytest.raises(SelfCheckError) as raised:
        EngineCore(config(backend))
    need_named(str(raised.value), backend, 3)
