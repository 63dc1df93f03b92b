"""DeepEP end to end on emulated ranks: several ranks equal one, whoever multiplies the weights, whatever is garbage."""

import functools
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe import MoeA2ABackend, MoeBackend, StandardTopK
from moe.check.reference import reference_moe
from moe.config import DispatchDtype
from moe.dispatch import deepep
from moe.dispatch.deepep import DeepepBuffer
from moe.dispatch.deepep_settings import DeepepMode, DeepepSettings, EpShape
from moe.errors import MoeConfigError, TransportStateError, UnsupportedPathError
from moe.formats import ExpertWeights
from tests.emulators.deepep import Buffer, install_deepep
from tests.emulators.ranks import Rank, run_ranks
from tests.emulators.refusal import KernelRefusal
from tests.moe.backends import hostile
from tests.moe.dispatch.several_ranks import E, I, K, only_rank, rank_inputs, run_layer, worst_error
from tests.moe.dispatch.several_ranks import deepep as deepep_dispatcher
from tests.moe.moe_layers import GPT_OSS
from tests.tables import rows

H = 2048
NORMAL_H = 128  # normal mode has no list of sizes; small ones are quick
TOKENS = {1: [7], 2: [5, 8], 4: [3, 0, 8, 1], 8: [1, 2, 0, 4, 5, 0, 7, 8]}
MODES = [DeepepMode.NORMAL, DeepepMode.LOW_LATENCY]
low_latency = functools.partial(deepep_dispatcher, mode=DeepepMode.LOW_LATENCY)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> type[Buffer]:
    return install_deepep(monkeypatch, wide=True)


@functools.cache
def experts_of(hidden: int = H) -> ExpertWeights:
    return hostile.plain_experts("mxfp4", E, hidden, I, has_biases=True)


def run_torch(mode: DeepepMode, num_tokens: list[int], hidden: int = H, **options: Any) -> list[torch.Tensor]:
    """Outputs of all ranks, which equal those of one."""
    if mode is DeepepMode.NORMAL:
        hidden = NORMAL_H
    experts, inputs = experts_of(hidden), rank_inputs(num_tokens, hidden, torch.float32)
    outputs = run_layer(
        experts, inputs, backend=MoeBackend.TORCH, a2a=MoeA2ABackend.DEEPEP, formats=mode.dispatch_formats,
        dispatcher_for=lambda rank, config: deepep_dispatcher(rank, mode, hidden), dtype=torch.float32,
        activation=GPT_OSS, **options,
    )  # fmt: skip
    assert worst_error(outputs, inputs, lambda x, topk: reference_moe(x, topk, experts, GPT_OSS)) < 1e-5
    return outputs


@rows("ep_size", 2, 4, 8)
@rows("mode", *MODES)
def test_ranks_equal_one_rank(library: type[Buffer], mode: DeepepMode, ep_size: int) -> None:
    first = next(out for out in run_torch(mode, TOKENS[ep_size]) if out.shape[0] > 2)
    assert torch.equal(first[2], torch.zeros(first.shape[1])), "all ids of this token are -1"


def test_one_rank_runs_low_latency_only(library: type[Buffer]) -> None:
    run_torch(DeepepMode.LOW_LATENCY, TOKENS[1])
    with pytest.raises(UnsupportedPathError, match="--expert-parallel-size is 1"):
        run_torch(DeepepMode.NORMAL, TOKENS[1])


@rows(
    "mode, num_tokens, options",
    (DeepepMode.AUTO, TOKENS[2], {"is_decode": False}),
    (DeepepMode.AUTO, TOKENS[2], {"is_decode": True}),
    (DeepepMode.LOW_LATENCY, [0, 0], {}),
    (DeepepMode.NORMAL, [0, 0], {}),
    (DeepepMode.LOW_LATENCY, [4, 3], {"hidden": 2880}),  # they travel as 3072 columns
)
def test_decode_no_tokens_padding(
    library: type[Buffer], mode: DeepepMode, num_tokens: list[int], options: dict[str, Any]
) -> None:
    assert [out.shape[0] for out in run_torch(mode, num_tokens, **options)] == num_tokens


@rows("dispatch_dtype, hidden, num_scales", (DispatchDtype.FP8, 2176, 17), (DispatchDtype.FP8_UE8M0, 3200, 7))
def test_scales_of_padded_columns_are_cut(
    library: type[Buffer], dispatch_dtype: DispatchDtype, hidden: int, num_scales: int
) -> None:
    """An fp32 scale covers 128 columns, four packed exponents cover 512."""
    dispatcher = low_latency(only_rank(), hidden=hidden, dispatch_dtype=dispatch_dtype)
    result = dispatcher.dispatch(hostile.tokens(4, hidden).bfloat16(), hostile.routing(4, E, K))
    assert (result.hidden_states.shape[-1], result.hidden_states_scale.shape[-1]) == (hidden, num_scales)


def test_ids_become_int64_and_weights_fp32(library: type[Buffer]) -> None:
    topk = hostile.routing(4, E, K)
    result = low_latency(only_rank()).dispatch(hostile.tokens(4, H), StandardTopK(topk.weights.bfloat16(), topk.ids))
    assert (result.topk_ids.dtype, result.topk_weights.dtype) == (torch.int64, torch.float32)


def test_expected_rows_is_even_routing_rounded_up() -> None:
    shape = EpShape(hidden_size=7168, num_experts=256, top_k=8, ep_size=8)
    assert [deepep.expected_rows(tokens, shape) for tokens in (64, 128, 1)] == [17, 33, 1]


@rows(
    "arguments, size",
    ((128, 7168, 8, 256), 1_908_410_496),
    ((128, 3072, 8, 32), 102_236_544),
    ((256, 7168, 16, 256), 3_816_818_816),
)
def test_emulated_size_hint_is_the_librarys(arguments: tuple[int, ...], size: int) -> None:
    assert Buffer.get_low_latency_rdma_size_hint(*arguments) == size


# ---- what is in flight ----


def test_two_batches_may_overlap_and_a_third_is_refused(library: type[Buffer]) -> None:
    dispatcher = low_latency(only_rank())
    batches = [(hostile.tokens(4, H, seed=seed).float(), hostile.routing(4, E, K, seed=seed)) for seed in range(3)]
    results = [dispatcher.dispatch(*batch) for batch in batches[:2]]
    with pytest.raises(TransportStateError, match="2 dispatched batches"):
        dispatcher.dispatch(*batches[2])
    for (x, topk), result in zip(batches, results, strict=False):
        out = dispatcher.combine(result.result(result.hidden_states, is_partial=False))  # the experts are the identity
        want = x * (topk.weights * (topk.ids >= 0)).sum(-1, keepdim=True)
        assert hostile.relative_error(out, want) < 1e-6
    dispatcher.dispatch(*batches[2])


def test_combine_wants_the_ids_it_gave_out(library: type[Buffer]) -> None:
    dispatcher = low_latency(only_rank())
    result = dispatcher.dispatch(hostile.tokens(4, H).float(), hostile.routing(4, E, K))
    with pytest.raises(TransportStateError, match="hand back the ids"):
        dispatcher.combine(replace(result.result(result.hidden_states, False), topk_ids=result.topk_ids.clone()))


def test_more_tokens_than_agreed_are_refused_with_both_numbers(library: type[Buffer]) -> None:
    with pytest.raises(TransportStateError, match=r"9 tokens, but --deepep-max-dispatch-tokens is 8"):
        low_latency(only_rank()).dispatch(hostile.tokens(9, H), hostile.routing(9, E, K))


def test_low_latency_after_normal_cleans_the_buffer_once(library: type[Buffer]) -> None:
    def work(rank: Rank) -> list[str]:
        dispatcher = deepep_dispatcher(rank, DeepepMode.AUTO)
        x, topk = hostile.tokens(4, H), hostile.routing(4, E, K)
        for is_decode in (False, True, True, False, True):
            result = dispatcher.dispatch(x, topk, is_decode=is_decode)
            dispatcher.combine(result.result(result.hidden_states, is_partial=False))
        return [name for name, _ in dispatcher.buffer.raw.calls]

    normal, low = ["dispatch"], ["low_latency_dispatch", "low_latency_combine"]
    assert run_ranks(2, work)[0] == [*normal, "clean", *low, *low, *normal, "clean", *low]


# ---- payloads ----


@rows("dispatch_dtype", DispatchDtype.BF16, DispatchDtype.FP8, DispatchDtype.FP8_UE8M0)
def test_scale_options_go_with_fp8_alone(library: type[Buffer], dispatch_dtype: DispatchDtype) -> None:
    dispatcher = low_latency(only_rank(), dispatch_dtype=dispatch_dtype)
    result: Any = dispatcher.dispatch(hostile.tokens(4, H), hostile.routing(4, E, K))
    sent = dispatcher.buffer.raw.calls[-1][1]
    assert (sent["use_fp8"], sent["use_ue8m0"]) == (dispatch_dtype.is_fp8, dispatch_dtype is DispatchDtype.FP8_UE8M0)
    if dispatch_dtype.is_fp8:
        assert result.hidden_states_scale.stride(-2) == 1, "the scales stay M-major"
        assert result.hidden_states_scale.dtype == (torch.int32 if sent["use_ue8m0"] else torch.float32)


def test_nvfp4_needs_a_build_that_has_it(library: type[Buffer]) -> None:
    with pytest.raises(UnsupportedPathError, match="use_nvfp4"):
        low_latency(only_rank(), dispatch_dtype=DispatchDtype.NVFP4)


def test_missing_library_is_named() -> None:
    with pytest.raises(UnsupportedPathError, match="--moe-a2a-backend deepep needs the package deep_ep"):
        low_latency(only_rank())


def test_a_rank_that_stays_away_is_an_error(library: type[Buffer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.emulators.ranks.MEETING_TIMEOUT_S", 0.2)

    def work(rank: Rank) -> None:
        if rank.rank() == 0:
            low_latency(rank).dispatch(hostile.tokens(2, H), hostile.routing(2, E, K))

    with pytest.raises(threading.BrokenBarrierError):
        run_ranks(2, work)


def test_library_checks_stand_behind_ours(library: type[Buffer]) -> None:
    raw = low_latency(only_rank()).buffer.raw
    with pytest.raises(KernelRefusal, match="unsupported hidden"):
        raw.low_latency_dispatch(torch.zeros(1, 1920).bfloat16(), torch.zeros(1, 1).long(), 8, 8)


@rows(
    "changes, error, words",
    ({"ep_size": 2}, MoeConfigError, "--expert-parallel-size is 2, but the group has 1"),
    ({"hidden_size": 9000}, UnsupportedPathError, "hidden size 9000"),
)
def test_group_and_sizes_are_checked_before_the_library_is_asked(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], error: type[Exception], words: str
) -> None:
    monkeypatch.setattr(DeepepBuffer, "build", lambda self, group: pytest.fail("built before the check"))
    shape = EpShape(**({"hidden_size": H, "num_experts": E, "top_k": K, "ep_size": 1} | changes))
    with pytest.raises(error, match=words):
        DeepepBuffer(only_rank(), DeepepSettings(mode=DeepepMode.LOW_LATENCY), shape, sends_fp8=False)


def queue_depth_of(tokens: int) -> int:
    """Depth of the send queues of a buffer for `tokens`."""
    settings = DeepepSettings(mode=DeepepMode.LOW_LATENCY, max_dispatch_tokens=tokens)
    shape = EpShape(hidden_size=2048, num_experts=8, top_k=3, ep_size=1)
    depth: int = DeepepBuffer(only_rank(), settings, shape, sends_fp8=False).raw.nvshmem_qp_depth
    return depth


@rows("depth, tokens", ("64", 32), ("1024", 512), ("2048", 1024))
def test_a_queue_depth_that_the_user_chose_is_kept(
    library: type[Buffer], monkeypatch: pytest.MonkeyPatch, depth: str, tokens: int
) -> None:
    """G67: refused with the depth the library took from the environment, and the remedy it names works."""
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", depth)
    with pytest.raises(MoeConfigError, match=f"deep_ep uses {depth}") as error:
        queue_depth_of(tokens)
    name, _, value = str(error.value).partition("start with ")[2].split()[0].partition("=")
    monkeypatch.setenv(name, value)
    assert queue_depth_of(tokens) == int(value)


@rows("tokens, depth", (128, 1024), (512, 2048), (1024, 4096))
def test_the_token_limit_sets_the_queue_depth(monkeypatch: pytest.MonkeyPatch, tokens: int, depth: int) -> None:
    install_deepep(monkeypatch, wide=True)
    assert queue_depth_of(tokens) == depth
