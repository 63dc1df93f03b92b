"""DeepEP after something went wrong on emulated ranks: failed experts, failed captures, a buffer that needs cleaning.

F1, F2 and F5 name what was seen on two cards with DeepEP 1.2.1.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe.dispatch.deepep import DeepepDispatcher
from moe.dispatch.deepep_settings import DeepepMode
from moe.errors import TransportStateError
from moe.routing import StandardTopK
from moe.types import DeepepLlDispatchOutput
from tests.emulators.deepep import Buffer, install_deepep
from tests.emulators.double_buffer import capturing
from tests.emulators.ranks import Rank, run_ranks
from tests.emulators.refusal import KernelRefusal
from tests.moe.backends import hostile
from tests.moe.dispatch.several_ranks import LIMIT, E, K, deepep, only_rank, rank_inputs
from tests.tables import rows

H = 2048
LOW_LATENCY, NORMAL, AUTO = DeepepMode.LOW_LATENCY, DeepepMode.NORMAL, DeepepMode.AUTO
Inputs = tuple[torch.Tensor, StandardTopK]


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> type[Buffer]:
    return install_deepep(monkeypatch, wide=True)


def own_inputs(rank: Rank) -> Inputs:
    inputs: Inputs = rank_inputs([5, 8], H, torch.float32)[rank.rank()]
    return inputs


def identity(dispatched: Any) -> Any:
    """What experts that change nothing hand back; normal mode's multiply by their weights."""
    if isinstance(dispatched, DeepepLlDispatchOutput):
        return dispatched.result(dispatched.hidden_states, is_partial=False)
    weight_R1 = (dispatched.topk_weights * (dispatched.topk_ids >= 0)).sum(1, keepdim=True)
    return dispatched.result(dispatched.hidden_states * weight_R1, is_partial=False)


def step(dispatcher: DeepepDispatcher, inputs: Inputs, *, is_decode: bool = True) -> torch.Tensor:
    return dispatcher.combine(identity(dispatcher.dispatch(*inputs, is_decode=is_decode)))


def check_step(dispatcher: DeepepDispatcher, inputs: Inputs) -> None:
    check_sum(step(dispatcher, inputs), inputs)


def check_sum(out_TH: torch.Tensor, inputs: Inputs) -> None:
    x_TH, topk = inputs
    assert hostile.relative_error(out_TH, x_TH * (topk.weights * (topk.ids >= 0)).sum(1, keepdim=True)) < 1e-6


def give_up(dispatcher: DeepepDispatcher, inputs: Inputs) -> None:
    """A step whose experts fail on this rank."""
    dispatcher.abandon(dispatcher.dispatch(*inputs, is_decode=True), torch.float32)


@rows("mode", LOW_LATENCY, NORMAL)
def test_steps_that_fail_on_all_ranks_leave_nothing_behind(mode: DeepepMode) -> None:
    def work(rank: Rank) -> int:
        dispatcher, inputs = deepep(rank, mode), own_inputs(rank)
        for _ in range(3):
            give_up(dispatcher, inputs)
        check_step(dispatcher, inputs)
        return len(dispatcher.buffer.in_flight)

    assert run_ranks(2, work) == [0, 0]


def fail_once(raw: Any) -> None:
    """The next combine is counted by the library, as all are, and dies before it is launched."""
    original = raw.low_latency_combine

    def combine(*arguments: Any, **options: Any) -> Any:
        raw.low_latency_combine = original
        raw.halves.next_half = 1 - raw.halves.next_half
        raise RuntimeError("launch failed")

    raw.low_latency_combine = combine


def captured_step(dispatcher: DeepepDispatcher, inputs: Inputs) -> Callable[[], None]:
    """A decode step captured by this rank, to be replayed."""
    dispatcher.prepare_replay()
    with capturing() as graph:
        step(dispatcher, inputs)

    def replay() -> None:
        dispatcher.prepare_replay()
        graph.replay()

    return replay


@rows("is_launch", False, True)
def test_where_even_giving_up_fails_all_ranks_clean(monkeypatch: pytest.MonkeyPatch, is_launch: bool) -> None:
    """F2: the number of calls is made even again, since captured steps have their halves baked in.

    Without the cleaning the emulator refuses the next step, as the card would wait for ever.
    """
    full, card = torch.full, SimpleNamespace(has_memory=True)

    def allocate(*arguments: Any, **options: Any) -> torch.Tensor:
        if not card.has_memory:
            raise torch.OutOfMemoryError("no memory")
        return full(*arguments, **options)

    monkeypatch.setattr(torch, "full", allocate)

    def work(rank: Rank) -> list[str]:
        dispatcher, inputs = deepep(rank), own_inputs(rank)
        replay = captured_step(dispatcher, inputs)
        replay()
        dispatched = dispatcher.dispatch(*inputs)
        rank.exchange("dispatched")
        card.has_memory = is_launch
        if is_launch:
            fail_once(dispatcher.buffer.raw)
        with pytest.raises(RuntimeError, match="launch failed" if is_launch else "no memory"):
            dispatcher.abandon(dispatched, torch.float32)
        rank.exchange("failed")
        card.has_memory = True
        assert not len(dispatcher.buffer.in_flight)
        before = len(dispatcher.buffer.raw.calls)
        check_step(dispatcher, inputs)
        replay()
        return [name for name, _ in dispatcher.buffer.raw.calls[before:]]

    dispatch, combine = "low_latency_dispatch", "low_latency_combine"
    mended = ["clean"] if is_launch else ["clean", dispatch, "clean"]
    assert run_ranks(2, work) == [[*mended, dispatch, combine]] * 2


def test_a_half_done_exchange_is_mended_before_a_replay_too() -> None:
    def work(rank: Rank) -> None:
        dispatcher, inputs = deepep(rank), own_inputs(rank)
        replay = captured_step(dispatcher, inputs)
        dispatched = dispatcher.dispatch(*inputs)
        dispatcher.buffer.in_flight.discard(dispatched.topk_ids)
        replay()
        check_step(dispatcher, inputs)

    run_ranks(2, work)


def test_a_capture_that_fails_between_dispatch_and_combine_leaves_the_buffer_usable() -> None:
    """F2: what was captured but never ran still counts; giving the batch up makes the count even."""

    def work(rank: Rank) -> None:
        dispatcher, inputs = deepep(rank), own_inputs(rank)
        replay = captured_step(dispatcher, inputs)
        check_step(dispatcher, inputs)
        with capturing():
            give_up(dispatcher, inputs)
        for _ in range(2):
            check_step(dispatcher, inputs)
            replay()

    run_ranks(2, work)


def test_the_emulator_punishes_what_the_library_punishes() -> None:
    """The reasons for all of the above, on the bare buffer: each of them hangs the card."""

    def send(raw: Any, inputs: Inputs) -> Any:
        x_TH, topk = inputs
        result = raw.low_latency_dispatch(x_TH, topk.ids.long(), LIMIT, E, use_fp8=False, return_recv_hook=True)
        result[-1]()
        return result

    def captured(rank: Rank, mode: DeepepMode = LOW_LATENCY) -> tuple[DeepepDispatcher, Inputs, Any]:
        dispatcher, inputs = deepep(rank, mode), own_inputs(rank)
        with capturing() as graph:
            step(dispatcher, inputs)
        return dispatcher, inputs, graph

    def half_captured(rank: Rank) -> None:
        raw, inputs = deepep(rank).buffer.raw, own_inputs(rank)
        received, _, handle, *_ = send(raw, inputs)
        raw.low_latency_combine(received, inputs[1].ids.long(), inputs[1].weights.float(), handle)
        with capturing():
            send(raw, inputs)
        with pytest.raises(KernelRefusal, match="counters of half 1 are not zero"):
            send(raw, inputs)

    def odd_replay(rank: Rank) -> None:
        dispatcher, inputs, graph = captured(rank)
        send(dispatcher.buffer.raw, inputs)
        with pytest.raises(KernelRefusal, match="counters of half 0 are not zero"):
            graph.replay()

    def replay_after_normal(rank: Rank) -> None:
        dispatcher, inputs, graph = captured(rank, AUTO)
        step(dispatcher, inputs, is_decode=False)
        with pytest.raises(KernelRefusal, match="counters of half 0 are not zero"):
            graph.replay()

    def normal_in_a_capture(rank: Rank) -> None:
        with capturing(), pytest.raises(KernelRefusal, match="waits for counts on the host"):
            deepep(rank, NORMAL).dispatch(*own_inputs(rank))

    for work in (half_captured, odd_replay, replay_after_normal, normal_in_a_capture):
        run_ranks(2, work)


def test_the_buffer_is_cleaned_before_a_capture_and_before_a_replay_never_inside() -> None:
    """F5: a captured cleaning would run at every replay, and one that was left out at none."""

    def work(rank: Rank) -> None:
        dispatcher, inputs = deepep(rank, AUTO), own_inputs(rank)
        step(dispatcher, inputs, is_decode=False)
        with capturing() as graph, pytest.raises(TransportStateError, match="before a capture, not in it"):
            dispatcher.dispatch(*inputs, is_decode=True)
        assert not graph.calls
        replay = captured_step(dispatcher, inputs)
        for _ in range(2):
            replay()
            step(dispatcher, inputs, is_decode=False)
        replay()
        check_step(dispatcher, inputs)
        names = [name for name, _ in dispatcher.buffer.raw.calls]
        assert names.count("clean") == 3, "once after each normal step"

    run_ranks(2, work)


# ---- the padding of low latency ----


@rows("hidden", 2048, 2880)
def test_results_written_like_the_received_rows_travel_without_a_copy(hidden: int) -> None:
    dispatcher = deepep(only_rank(), hidden=hidden)
    inputs = hostile.tokens(4, hidden).float(), hostile.routing(4, E, K)
    dispatched = dispatcher.dispatch(*inputs)
    rows_EMH = torch.full((E, LIMIT, 3072 if hidden == 2880 else hidden), float("nan"))[..., :hidden]
    assert rows_EMH.stride() == dispatched.hidden_states.stride()
    rows_EMH.copy_(dispatched.hidden_states)
    out_TH = dispatcher.combine(dispatched.result(rows_EMH, is_partial=False))
    name, sent = dispatcher.buffer.raw.calls[-1]
    assert (name, sent["address"]) == ("low_latency_combine", rows_EMH.data_ptr())
    check_sum(out_TH, inputs)


@rows("ep_size, most", (1, 8 * K), (4, 4 * 8 * 2), (8, 8 * 8))
def test_the_most_rows_that_can_arrive(ep_size: int, most: int) -> None:
    """A token takes an expert at most once, so with fewer local experts than choices it brings one row to each."""

    def work(rank: Rank) -> int | None:
        dispatched = deepep(rank).dispatch(hostile.tokens(4, H).float(), hostile.routing(4, E, K))
        assert isinstance(dispatched, DeepepLlDispatchOutput)
        return dispatched.max_rows

    assert run_ranks(ep_size, work) == [most] * ep_size
