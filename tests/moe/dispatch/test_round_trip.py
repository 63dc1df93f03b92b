"""The round trip over every transport on emulated ranks, built by the factory; and transports that lose or repeat."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from moe import MoeA2ABackend, SelfCheckError, Topology
from moe.config import DispatchDtype, DispatchFormat
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
from tests.moe.backends import hostile
from tests.tables import rows

E, K, H, LIMIT = 8, 3, 2048, 8
LOW, NORMAL, AUTO = DeepepMode.LOW_LATENCY, DeepepMode.NORMAL, DeepepMode.AUTO
NONE, DEEPEP, MORI = MoeA2ABackend.NONE, MoeA2ABackend.DEEPEP, MoeA2ABackend.MORI
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def reduce_over_threads(monkeypatch: Patch) -> None:
    monkeypatch.setattr(transport, "sum_over", lambda rank: lambda x: torch.stack(rank.exchange(x)).sum(0))


def round_trip(
    num_ranks: int,
    a2a: MoeA2ABackend = NONE,
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
        config = hostile.make_config(E, H, 64, K, place=topology, max_num_tokens=LIMIT)
        settings = DeepepSettings(mode=mode, max_dispatch_tokens=LIMIT)
        built = build_transport(topology, config, group=rank, settings=settings, dispatch_dtypes={dispatch_dtype})
        dispatcher = built.dispatcher(DispatchSpec(dispatch_dtype=dispatch_dtype))
        spoil(dispatcher)
        return check_round_trip(dispatcher, dispatch_formats(a2a, mode), config, topology, max_num_tokens=LIMIT)

    return run_ranks(num_ranks, work)


@rows("num_ranks", 2, 4)
@rows("mode", LOW, NORMAL, AUTO)
@rows("dispatch_dtype", DispatchDtype.BF16, DispatchDtype.FP8, DispatchDtype.FP8_UE8M0)
def test_deepep(monkeypatch: Patch, dispatch_dtype: DispatchDtype, mode: DeepepMode, num_ranks: int) -> None:
    install_deepep(monkeypatch)
    errors = round_trip(num_ranks, DEEPEP, mode, dispatch_dtype)
    assert all(0 < error < TOLERANCES[dispatch_dtype] / 1.5 for error in errors)


@rows("mode", LOW, NORMAL)
@rows("dispatch_dtype", DispatchDtype.BF16, DispatchDtype.FP8)
def test_mori(monkeypatch: Patch, mode: DeepepMode, dispatch_dtype: DispatchDtype) -> None:
    install_mori(monkeypatch)
    assert max(round_trip(4, MORI, mode, dispatch_dtype)) < TOLERANCES[dispatch_dtype] / 1.5


@rows(
    "mode, layout",
    (LOW, DispatchFormat.MORI_LL), (NORMAL, DispatchFormat.MORI_NORMAL), (AUTO, DispatchFormat.MORI_NORMAL),
)  # fmt: skip
def test_mori_sends_the_layout_of_its_mode(monkeypatch: Patch, mode: DeepepMode, layout: DispatchFormat) -> None:
    install_mori(monkeypatch)
    sent: list[DispatchFormat] = []

    def watch(dispatcher: Any) -> None:
        genuine = dispatcher.dispatch

        def dispatch(*arguments: Any) -> Any:
            dispatched = genuine(*arguments)
            sent.append(dispatched.format)
            return dispatched

        dispatcher.dispatch = dispatch

    round_trip(2, MORI, mode, spoil=watch)
    assert set(sent) == {layout}
    assert dispatch_formats(MORI, mode) == (layout,)


@rows("a2a", *MoeA2ABackend)
def test_a_transport_names_every_layout_that_a_mode_sends(a2a: MoeA2ABackend) -> None:
    """Where no mode is given, backends must support all of these."""
    assert set(a2a.dispatch_formats) == {layout for mode in DeepepMode for layout in dispatch_formats(a2a, mode)}


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


def spoiled(change: Callable[[torch.Tensor], object]) -> Callable[[DeepepDispatcher], None]:
    """Changes what `combine` gives, in place."""

    def spoil(dispatcher: DeepepDispatcher) -> None:
        original = dispatcher.combine

        def combine(result: Any) -> torch.Tensor:
            out = original(result)
            change(out)
            return out

        dispatcher.combine = combine  # type: ignore[method-assign, assignment]

    return spoil


def neighbours_rows(dispatcher: Any) -> None:
    """The rows of two experts trade places on the way here."""
    original = dispatcher.dispatch

    def dispatch(*args: Any, **options: Any) -> Any:
        dispatched = original(*args, **options)
        dispatched.hidden_states[:2] = dispatched.hidden_states[:2].flip(0).clone()
        return dispatched

    dispatcher.dispatch = dispatch


@rows("spoil", spoiled(lambda out: out.mul_(1.04)), spoiled(lambda out: out[5].zero_()), neighbours_rows)
def test_faults_of_low_latency_are_caught(monkeypatch: Patch, spoil: Callable[[Any], None]) -> None:
    install_deepep(monkeypatch)
    with pytest.raises(SelfCheckError, match=r"transport deepep \(deepep_ll, bf16\): token \d of rank \d came back"):
        round_trip(2, DEEPEP, spoil=spoil)


@rows("dispatch_dtype", DispatchDtype.FP8, DispatchDtype.FP8_UE8M0)
def test_rounding_to_fp8_hides_no_wrong_expert(monkeypatch: Patch, dispatch_dtype: DispatchDtype) -> None:
    """One slot at a wrong expert changes a token by a fifth."""
    install_deepep(monkeypatch)
    with pytest.raises(SelfCheckError, match=rf"transport deepep \(deepep_ll, {dispatch_dtype}\): token \d"):
        round_trip(2, DEEPEP, dispatch_dtype=dispatch_dtype, spoil=spoiled(lambda out: out.mul_(1.2)))


@rows("times", 0, 2)
def test_a_lost_or_repeated_sum_is_caught(monkeypatch: Patch, times: int) -> None:
    def sum_over(rank: Rank) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x if times == 0 else 2 * torch.stack(rank.exchange(x)).sum(0)

    monkeypatch.setattr(transport, "sum_over", sum_over)
    with pytest.raises(SelfCheckError, match=r"transport none \(standard, bf16\)"):
        round_trip(2)


# ---- what the factory refuses, before anything is allocated ----


@dataclass
class Group:
    num_ranks: int

    def size(self) -> int:
        return self.num_ranks


@rows(
    "a2a, num_ranks, changes, error, words",
    (NONE, None, {}, MoeConfigError, "tp_size 1 x ep_size 2 needs a process group"),
    (DEEPEP, None, {"ep_size": 1}, MoeConfigError, "--moe-a2a-backend deepep on tp_size 1 x ep_size 1 needs"),
    (NONE, 3, {}, MoeConfigError, "are 2 ranks, but the process group has 3"),
    (DEEPEP, 4, {"tp_size": 2}, UnsupportedPathError, "--tensor-parallel-size of the experts is 2"),
    (DEEPEP, 2, {"max_num_tokens": 9}, MoeConfigError, "--deepep-max-dispatch-tokens is 8, but a step may have 9"),
    (DEEPEP, 2, {"row_multiple": 128}, MoeConfigError,
     "is 8: times 2 ranks it must be a multiple of 128, for the layout of the scales, but is 16"),
    (MORI, 2, {"dtypes": {DispatchDtype.BF16, DispatchDtype.FP8}}, MoeConfigError, r"layers want \[.*bf16.*fp8"),
)  # fmt: skip
def test_impossible_transports_are_refused_with_the_numbers(
    a2a: MoeA2ABackend, num_ranks: int | None, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    topology = Topology(tp_size=changes.get("tp_size", 1), ep_size=changes.get("ep_size", 2), a2a=a2a)
    max_num_tokens = changes.get("max_num_tokens", LIMIT)
    config = hostile.make_config(E, H, 64, K, place=topology, max_num_tokens=max_num_tokens)
    group: Any = None if num_ranks is None else Group(num_ranks)
    with pytest.raises(error, match=words):
        build_transport(
            topology, config, group=group, settings=DeepepSettings(mode=LOW, max_dispatch_tokens=LIMIT),
            dispatch_dtypes=changes.get("dtypes", {DispatchDtype.BF16}), row_multiple=changes.get("row_multiple", 4),
        )  # fmt: skip


def test_buffers_hold_a_whole_step(monkeypatch: Patch) -> None:
    """The factory hands DeepEP the limit that its settings name."""
    seen: list[int] = []

    def size_hint(limit: int, *rest: int) -> int:
        seen.append(limit)
        return original(limit, *rest)

    original = Buffer.get_low_latency_rdma_size_hint
    monkeypatch.setattr(install_deepep(monkeypatch), "get_low_latency_rdma_size_hint", staticmethod(size_hint))
    round_trip(2, DEEPEP)
    assert set(seen) == {LIMIT}
