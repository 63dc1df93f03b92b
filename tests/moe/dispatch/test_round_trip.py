"""The round trip over every transport on emulated ranks, built by the factory; and transports that lose or repeat."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe import MoeA2ABackend, SelfCheckError, Topology
from moe.config import DispatchDtype
from moe.dispatch import transport
from moe.dispatch.deepep import DeepepDispatcher
from moe.dispatch.deepep_settings import DeepepMode, DeepepSettings
from moe.dispatch.round_trip import TOLERANCES, check_round_trip
from moe.dispatch.transport import DispatchSpec, build_transport, dispatch_formats
from moe.errors import MoeConfigError, UnsupportedPathError
from tests.emulators.alltoall import install_alltoall
from tests.emulators.deepep import Buffer, install_deepep
from tests.emulators.low_latency import install_low_latency
from tests.emulators.mori import install_mori
from tests.emulators.ranks import Rank, run_ranks
from tests.moe.configs import rank_config
from tests.tables import rows

E, K, H, LIMIT = 8, 3, 2048, 8
LOW, NORMAL, AUTO = DeepepMode.LOW_LATENCY, DeepepMode.NORMAL, DeepepMode.AUTO
DEEPEP, MORI = MoeA2ABackend.DEEPEP, MoeA2ABackend.MORI
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def reduce_over_threads(monkeypatch: Patch) -> None:
    monkeypatch.setattr(transport, "sum_over", lambda rank: lambda x: torch.stack(rank.exchange(x)).sum(0))


def round_trip(
    num_ranks: int,
    a2a: MoeA2ABackend = MoeA2ABackend.NONE,
    mode: DeepepMode = LOW,
    dispatch_dtype: DispatchDtype = DispatchDtype.BF16,
    tp_size: int = 1,
    spoil: Callable[[Any], None] = lambda dispatcher: None,
) -> list[float]:
    """The error that every rank reports."""
    ep_size = num_ranks // tp_size

    def work(rank: Rank) -> float:
        ep_rank, tp_rank = divmod(rank.rank(), tp_size)
        topology = Topology(
            tp_size=tp_size, tp_rank=tp_rank, ep_size=ep_size, ep_rank=ep_rank, a2a=a2a, dispatch_dtype=dispatch_dtype
        )
        config = rank_config(
            num_experts=E, hidden_size=H, intermediate_size=64, top_k=K, place=topology, max_num_tokens=LIMIT
        )
        settings = DeepepSettings(mode=mode, max_dispatch_tokens=LIMIT)
        built = build_transport(topology, config, group=rank, settings=settings, dispatch_dtypes={dispatch_dtype})
        dispatcher = built.dispatcher(DispatchSpec(dispatch_dtype=dispatch_dtype))
        spoil(dispatcher)
        return check_round_trip(dispatcher, dispatch_formats(a2a, mode), config, topology, max_num_tokens=LIMIT)

    return run_ranks(num_ranks, work)


def test_deepep(subtests: pytest.Subtests, monkeypatch: Patch) -> None:
    for dispatch_dtype, mode, num_ranks in itertools.product(
        [DispatchDtype.BF16, DispatchDtype.FP8, DispatchDtype.FP8_UE8M0], [LOW, NORMAL, AUTO], [2, 4]
    ):
        with subtests.test(dispatch_dtype=dispatch_dtype, mode=mode, num_ranks=num_ranks):
            install_deepep(monkeypatch)
            errors = round_trip(num_ranks, DEEPEP, mode, dispatch_dtype)
            assert all(0 < error < TOLERANCES[dispatch_dtype] / 1.5 for error in errors)


@rows("mode", LOW, NORMAL)
@rows("dispatch_dtype", DispatchDtype.BF16, DispatchDtype.FP8)
def test_mori(monkeypatch: Patch, mode: DeepepMode, dispatch_dtype: DispatchDtype) -> None:
    install_mori(monkeypatch)
    assert max(round_trip(4, MORI, mode, dispatch_dtype)) < TOLERANCES[dispatch_dtype] / 1.5


@rows("a2a", MoeA2ABackend.MOONCAKE, MoeA2ABackend.NIXL)
def test_low_latency_libraries(monkeypatch: Patch, a2a: MoeA2ABackend) -> None:
    install_low_latency(monkeypatch)
    assert max(round_trip(4, a2a, dispatch_dtype=DispatchDtype.FP8)) < TOLERANCES[DispatchDtype.FP8] / 1.5


def test_flashinfer(monkeypatch: Patch) -> None:
    install_alltoall(monkeypatch)
    assert max(round_trip(4, MoeA2ABackend.FLASHINFER)) < 1e-2


@rows("num_ranks, tp_size", (2, 1), (2, 2), (4, 2))
def test_sums_over_ranks(num_ranks: int, tp_size: int) -> None:
    assert max(round_trip(num_ranks, tp_size=tp_size)) < 1e-2


# ---- transports that are wrong ----


def too_large(dispatcher: DeepepDispatcher) -> None:
    original = dispatcher._combine_low_latency
    dispatcher._combine_low_latency = lambda result: original(result) * 1.04  # type: ignore[method-assign]


def zero_a_token(dispatcher: Any) -> None:
    original = dispatcher.combine

    def combine(result: Any) -> torch.Tensor:
        out: torch.Tensor = original(result)
        out[5] = 0
        return out

    dispatcher.combine = combine


def neighbours_rows(dispatcher: Any) -> None:
    """The rows of two experts trade places on the way here."""
    original = dispatcher.dispatch

    def dispatch(*args: Any, **options: Any) -> Any:
        dispatched = original(*args, **options)
        x = dispatched.hidden_states
        x[:2] = x[:2].flip(0).clone()
        return dispatched

    dispatcher.dispatch = dispatch


@rows("spoil", too_large, zero_a_token, neighbours_rows)
def test_faults_of_low_latency_are_caught(monkeypatch: Patch, spoil: Callable[[Any], None]) -> None:
    install_deepep(monkeypatch)
    with pytest.raises(SelfCheckError, match=r"transport deepep \(deepep_ll, bf16\): token \d of rank \d came back"):
        round_trip(2, DEEPEP, spoil=spoil)


@rows("dispatch_dtype", DispatchDtype.FP8, DispatchDtype.FP8_UE8M0)
def test_rounding_to_fp8_hides_no_wrong_expert(monkeypatch: Patch, dispatch_dtype: DispatchDtype) -> None:
    """One slot at a wrong expert changes a token by a fifth."""

    def a_fifth_too_large(dispatcher: Any) -> None:
        original = dispatcher.combine
        dispatcher.combine = lambda result: original(result) * 1.2

    install_deepep(monkeypatch)
    with pytest.raises(SelfCheckError, match=rf"transport deepep \(deepep_ll, {dispatch_dtype}\): token \d"):
        round_trip(2, DEEPEP, dispatch_dtype=dispatch_dtype, spoil=a_fifth_too_large)


@rows("times", 0, 2)
def test_a_lost_or_repeated_sum_is_caught(monkeypatch: Patch, times: int) -> None:
    def reduce(rank: Rank, x: torch.Tensor) -> torch.Tensor:
        for _ in range(times):
            x = torch.stack(rank.exchange(x)).sum(0)
        return x

    monkeypatch.setattr(transport, "sum_over", lambda rank: lambda x: reduce(rank, x))
    with pytest.raises(SelfCheckError, match=r"transport none \(standard, bf16\)"):
        round_trip(2)


# ---- what the factory refuses, before anything is allocated ----


def build(a2a: MoeA2ABackend, group: Any, **changes: Any) -> None:
    settings: dict[str, Any] = {
        "tp_size": 1,
        "ep_size": 2,
        "max_num_tokens": LIMIT,
        "dispatch_dtypes": {DispatchDtype.BF16},
        "row_multiple": 4,
    } | changes
    topology = Topology(tp_size=settings["tp_size"], ep_size=settings["ep_size"], a2a=a2a)
    config = rank_config(
        num_experts=E, hidden_size=H, intermediate_size=64, top_k=K, place=topology,
        max_num_tokens=settings["max_num_tokens"],
    )  # fmt: skip
    deepep = DeepepSettings(mode=LOW, max_dispatch_tokens=LIMIT)
    build_transport(
        topology,
        config,
        group=group,
        settings=deepep,
        dispatch_dtypes=settings["dispatch_dtypes"],
        row_multiple=settings["row_multiple"],
    )


class Group:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def test_impossible_transports_are_refused_with_the_numbers(subtests: pytest.Subtests) -> None:
    for a2a, group, changes, error, words in [
        (MoeA2ABackend.NONE, None, {}, MoeConfigError, "tp_size 1 x ep_size 2 needs a process group"),
        (DEEPEP, None, {"ep_size": 1}, MoeConfigError, "--moe-a2a-backend deepep on tp_size 1 x ep_size 1 needs"),
        (MoeA2ABackend.NONE, Group(3), {}, MoeConfigError, "are 2 ranks, but the process group has 3"),
        (DEEPEP, Group(4), {"tp_size": 2}, UnsupportedPathError, "--tensor-parallel-size of the experts is 2"),
        (DEEPEP, Group(2), {"max_num_tokens": 9}, MoeConfigError, "--deepep-max-dispatch-tokens is 8, but a step may"),
        (
            DEEPEP, Group(2), {"row_multiple": 128}, MoeConfigError,
            "is 8: times 2 ranks it must be a multiple of 128, for the layout of the scales, but is 16",
        ),
        (
            MORI, Group(2), {"dispatch_dtypes": {DispatchDtype.BF16, DispatchDtype.FP8}},
            MoeConfigError, r"layers want \[.*bf16.*fp8",
        ),
    ]:  # fmt: skip
        with (
            subtests.test(a2a=a2a, group=group, changes=changes, error=error, words=words),
            pytest.raises(error, match=words),
        ):
            build(a2a, group, **changes)


def test_buffers_hold_a_whole_step(monkeypatch: Patch) -> None:
    """The factory hands DeepEP the limit that its settings name."""
    library = install_deepep(monkeypatch)
    seen: list[int] = []
    original = Buffer.get_low_latency_rdma_size_hint
    monkeypatch.setattr(
        library,
        "get_low_latency_rdma_size_hint",
        staticmethod(lambda limit, *rest: (seen.append(limit), original(limit, *rest))[1]),
    )
    round_trip(2, DEEPEP)
    assert set(seen) == {LIMIT}
