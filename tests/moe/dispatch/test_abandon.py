"""A rank whose experts failed, on every transport: the others get NaN for its part, and the next step is right."""

from typing import Any

import pytest
import torch

from moe import StandardTopK
from moe.config import DispatchDtype
from moe.dispatch.base import abandon
from moe.dispatch.deepep import DeepepBuffer
from moe.dispatch.deepep_settings import DeepepMode
from moe.dispatch.flashinfer import FlashinferDispatcher, build_alltoall
from moe.dispatch.mooncake import MooncakeBuffer
from moe.dispatch.mori import MoriBuffer, MoriDispatcher, MoriSettings
from moe.dispatch.nixl import NixlBuffer
from moe.dispatch.standard import StandardDispatcher
from moe.errors import TransportStateError
from tests.emulators.alltoall import install_alltoall
from tests.emulators.deepep import install_deepep
from tests.emulators.low_latency import install_low_latency
from tests.emulators.mori import install_mori
from tests.emulators.ranks import Rank, run_ranks
from tests.moe.backends import hostile
from tests.moe.dispatch.several_ranks import LIMIT, E, K, deepep, only_rank, shape_of
from tests.tables import rows

H = 2048


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    install_deepep(monkeypatch)
    install_low_latency(monkeypatch)
    install_mori(monkeypatch)
    install_alltoall(monkeypatch)


def inputs_of(rank: Rank) -> tuple[torch.Tensor, StandardTopK]:
    """Four tokens; the first uses an expert of either rank, the last ones those of their own rank alone."""
    own = rank.rank() * (E // 2) + torch.arange(3)
    ids_TK = own.repeat(4, 1).int()
    ids_TK[0, 0] = (own[0] + E // 2) % E
    return hostile.tokens(4, H, seed=rank.rank()), StandardTopK(torch.full((4, K), 1 / K), ids_TK)


def low_latency(kind: type[DeepepBuffer], rank: Rank) -> tuple[Any, Any]:
    return deepep(rank, kind=kind), lambda got: got.result(got.hidden_states, is_partial=False)


def deepep_normal(rank: Rank) -> tuple[Any, Any]:
    def experts(got: Any) -> Any:
        weight_R1 = (got.topk_weights * (got.topk_ids >= 0)).sum(1, keepdim=True)
        return got.result((got.hidden_states.float() * weight_R1).to(torch.bfloat16), is_partial=False)

    return deepep(rank, DeepepMode.NORMAL), experts


def mori(rank: Rank, *, is_low_latency: bool) -> tuple[Any, Any]:
    settings = MoriSettings(low_latency=is_low_latency, max_dispatch_tokens=LIMIT)
    buffer = MoriBuffer(rank, settings, shape_of(rank, H), DispatchDtype.BF16)
    return MoriDispatcher(buffer), lambda got: weighted(rank, got, StandardTopK(got.topk_weights, got.topk_ids))


def flashinfer(rank: Rank) -> tuple[Any, Any]:
    shape = shape_of(rank, H)
    dispatcher = FlashinferDispatcher(build_alltoall(rank, shape, LIMIT), rank.rank(), shape, LIMIT)
    return dispatcher, lambda got: weighted(rank, got, got.topk_output)


def standard(rank: Rank) -> tuple[Any, Any]:
    def reduce(x_TH: torch.Tensor) -> torch.Tensor:
        parts: list[torch.Tensor] = rank.exchange(x_TH.float())
        return torch.stack(parts).sum(0).to(x_TH.dtype)

    return StandardDispatcher(reduce), lambda got: weighted(rank, got, got.topk_output)


def weighted(rank: Rank, got: Any, topk: StandardTopK) -> Any:
    """This rank's experts, which change nothing, weighted; rows that nobody filled become zeros."""
    is_own_RK = topk.ids // (E // 2) == rank.rank()  # -1 is nobody's
    factor_R1 = torch.where(is_own_RK, topk.weights.float(), 0.0).sum(1, keepdim=True)
    rows_RH = torch.where(factor_R1 == 0, 0.0, got.hidden_states.float() * factor_R1)
    return got.result(rows_RH.to(torch.bfloat16), is_partial=True)


TRANSPORTS = {
    "deepep": lambda rank: low_latency(DeepepBuffer, rank),
    "deepep normal": deepep_normal,
    "mooncake": lambda rank: low_latency(MooncakeBuffer, rank),
    "nixl": lambda rank: low_latency(NixlBuffer, rank),
    "mori": lambda rank: mori(rank, is_low_latency=False),
    "mori low latency": lambda rank: mori(rank, is_low_latency=True),
    "flashinfer": flashinfer,
    "none": standard,
}


@rows("name", *TRANSPORTS)
def test_failed_experts_are_seen_by_those_who_use_them_and_by_nobody_later(name: str) -> None:
    """F1: before, the third step after failures was refused on this rank, and the others waited for ever."""

    def work(rank: Rank) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dispatcher, experts = TRANSPORTS[name](rank)
        x_TH, topk = inputs_of(Rank(rank.group, 0) if name == "none" else rank)  # without transport: equal tokens
        for _ in range(3):
            dispatched = dispatcher.dispatch(x_TH, topk)
            if rank.rank() == 0:
                abandon(dispatcher, dispatched, torch.bfloat16)
            else:
                poisoned_TH = dispatcher.combine(experts(dispatched))
        healed_TH = dispatcher.combine(experts(dispatcher.dispatch(x_TH, topk)))
        return x_TH, poisoned_TH if rank.rank() else healed_TH, healed_TH

    for index, (x_TH, poisoned_TH, healed_TH) in enumerate(run_ranks(2, work)):
        assert hostile.relative_error(healed_TH, x_TH) < 1e-2
        if index == 1:
            want = [True] * 4 if name == "none" else [True, False, False, False]
            assert poisoned_TH.isnan().all(1).tolist() == want


def test_one_rank_without_a_transport_has_nothing_to_give_up() -> None:
    dispatcher = StandardDispatcher()
    dispatched = dispatcher.dispatch(torch.ones(2, 4), StandardTopK(torch.ones(2, 1), torch.zeros(2, 1).int()))
    dispatcher.abandon(dispatched, torch.bfloat16)
    dispatcher.prepare_replay()
    assert dispatcher.why_not_capturable(10**6) is None


@rows("name", "mori", "flashinfer")
def test_transports_that_nobody_captured_say_so(name: str) -> None:
    (reason,) = run_ranks(1, lambda rank: TRANSPORTS[name](rank)[0].why_not_capturable(1))
    assert f"--moe-a2a-backend {name}" in reason


@rows("kind", MooncakeBuffer, NixlBuffer)
def test_a_library_that_cannot_clean_asks_for_a_restart(kind: type[DeepepBuffer]) -> None:
    def work(rank: Rank) -> None:
        dispatcher, _ = low_latency(kind, rank)
        dispatched = dispatcher.dispatch(*inputs_of(rank))
        dispatcher.buffer.in_flight.discard(dispatched.topk_ids)
        with pytest.raises(TransportStateError, match="restart all ranks"):
            dispatcher.dispatch(*inputs_of(rank))

    run_ranks(2, work)


def test_nixl_keeps_its_scale_options() -> None:
    """Its `dispatch` takes `**kwargs`, in which options cannot be seen; without them deep_gemm on SM100 is refused."""
    dispatcher = deepep(only_rank(), dispatch_dtype=DispatchDtype.FP8_UE8M0, kind=NixlBuffer)
    sent = dispatcher.dispatch(hostile.tokens(4, H), hostile.routing(4, E, K))
    assert sent.hidden_states_scale.dtype == torch.int32
