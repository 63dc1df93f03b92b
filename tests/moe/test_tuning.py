"""Tuning of whole layers on emulated kernels: what is chosen, refused, kept and used again, and what has no tactics."""

import json
import logging
import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe import MoeA2ABackend, MoeBackend, MoeConfigError, MoeRunner, StandardDispatchOutput, Topology
from moe.backends.flashinfer.profiles import profiles_of
from moe.config import DispatchFormat
from moe.formats import ExpertWeights
from moe.registry import load_backend
from moe.tune import layers as tuning
from moe.tune import measure as tuning_measure
from moe.tune.cache import TuneKey, TuningCache
from moe.tune.layers import LayerTuner, TuningSettings, tune_layer
from moe.tune.measure import Measurer, _largest_error, _new_memory_is_nan
from moe.tune.policy import MAX_TOKEN_COUNTS
from tests.moe.backends import hostile
from tests.moe.moe_layers import GPT_OSS, make_config, make_experts
from tests.moe.tunable import Profiled, install_profiles
from tests.tables import rows

E, H, I, K = 4, 96, 160, 3
COUNTS = (1, 6)
ALONE = Topology()
SECONDS = {0: 9.0, 1: 4.0, 2: 2.0, 3: 1.0, 5: 9.0, 6: 3.0, 7: 2.0}
Layer = tuple[MoeRunner, Any, ExpertWeights, Topology]


def mxfp4_layer(backend: MoeBackend = MoeBackend.FLASHINFER_MXFP4, topology: Topology = ALONE) -> Layer:
    whole = hostile.plain_experts("mxfp4", E, H, I, has_biases=True)
    experts = hostile.shard(whole, ep=(topology.ep_size, topology.ep_rank))
    dtype = torch.bfloat16 if backend is MoeBackend.FLASHINFER_MXFP4 else torch.float32
    config = hostile.make_config(E, H, experts.intermediate_size, K, place=topology, activation=GPT_OSS, dtype=dtype)
    runner = MoeRunner(backend, MoeA2ABackend.NONE, config)
    return runner, load_backend(backend).prepare(experts, config, topology), experts, topology


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> Profiled:
    return install_profiles(monkeypatch, dict(SECONDS))


def tuner(folder: Path | None, *, is_on: bool = True, budget_s: float = 3600.0, **changes: Any) -> LayerTuner:
    """The budget counts real seconds: a slow machine must not cut the measurements short."""
    settings = TuningSettings(is_on=is_on, cache_folder=folder, token_counts=COUNTS, budget_s=budget_s, **changes)
    return LayerTuner(settings)


def pairs(info: Any) -> list[tuple[int, int] | None]:
    return [info.profiles.pick(count) for count in (1, 2, 6, 5000)]


@rows("ep_size", 1, 2)
def test_the_best_profile_of_either_gemm_is_found_and_kept(profiled: Profiled, tmp_path: Path, ep_size: int) -> None:
    profiled.fails, profiled.no_occupancy = {7}, {8}
    topology = Topology(ep_size=ep_size, ep_rank=ep_size - 1)
    runner, info, *_ = layer = mxfp4_layer(topology=topology)
    tuned = tuner(tmp_path / "new").tuned(*layer)
    assert pairs(info) == [None] * 4, "what was prepared is not changed"
    assert pairs(tuned) == [(3, 6)] * 4
    assert tuned.w13 is info.w13
    assert profiled.shapes == {(1, 512, 128), (2, 128, 256)}, "padded sizes"
    (file,) = (tmp_path / "new").iterdir()
    assert json.loads(file.read_text())["choice"] == {"1": "3/6", "6": "3/6"}

    profiled.emulator.calls.clear()
    for is_on in (True, False):  # a later start, with the flag or without
        again = tuner(tmp_path / "new", is_on=is_on).tuned(*layer)
        assert pairs(again) == pairs(tuned)
    assert not profiled.used, "nothing is measured again"
    x, topk = hostile.tokens(5, H), hostile.routing(5, E, K)
    got = runner.run(StandardDispatchOutput(x, topk), again).hidden_states
    untuned = runner.run(StandardDispatchOutput(x, topk), info).hidden_states
    assert profiled.used == [[3, 6], [-1, -1]]
    assert torch.equal(got, untuned)
    assert profiled.emulator.calls[0].options.fused_finalize is False, "the same order of additions in every run"


@rows("fault", "wrong", "writes_nothing")
def test_a_fast_wrong_profile_is_refused(profiled: Profiled, caplog: pytest.LogCaptureFixture, fault: str) -> None:
    getattr(profiled, fault).add(7)
    with caplog.at_level(logging.WARNING):
        tuned = tuner(None).tuned(*mxfp4_layer())
    assert pairs(tuned) == [(3, 6)] * 4, "7 is faster"
    assert "flashinfer_mxfp4: tactic 3/7 is off by" in caplog.text
    assert "at 6 tokens and is not used" in caplog.text


def test_layers_of_one_shape_share_a_budget(
    profiled: Profiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    one = tuner(blocked / "below")  # that cannot be written: memory is enough for the other layers
    runner, *rest = layer = mxfp4_layer()
    tuned = one.tuned(*layer)
    profiled.emulator.calls.clear()
    assert pairs(one.tuned(*mxfp4_layer())) == pairs(tuned) == [(3, 7)] * 4
    assert not profiled.used
    monkeypatch.setattr(one, "_left_s", 0.0)
    larger = MoeRunner(runner.backend, runner.a2a, hostile.make_config(E, H, I, K - 1, activation=GPT_OSS))
    assert pairs(one.tuned(larger, *rest)) == [(-1, -1)] * 4, "another shape, but no time left"


def test_the_time_that_a_layer_took_is_missing_for_the_next_shape(
    profiled: Profiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = iter([0.0, 35.0, 35.0, 40.0, 40.0, 41.0])
    given: list[float] = []

    def tune_layer(runner: Any, info: Any, experts: Any, **arguments: Any) -> Any:
        given.append(arguments["budget_s"])
        return info

    monkeypatch.setattr(tuning, "tune_layer", tune_layer)
    monkeypatch.setattr(tuning, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    one = tuner(tmp_path, budget_s=38.0)
    layer = mxfp4_layer()
    for _ in range(3):
        one.tuned(*layer)
    assert given == [38.0, 3.0, 0.0]


def test_what_nobody_had_time_to_measure_is_measured_by_the_next_start(profiled: Profiled, tmp_path: Path) -> None:
    layer = mxfp4_layer()
    hasty = tuner(tmp_path, budget_s=0.0)
    for _ in range(2):
        assert pairs(hasty.tuned(*layer)) == [(-1, -1)] * 4
    assert len(profiled.used) == len(COUNTS), "checked once for each count, for all layers of the shape"
    assert not list(tmp_path.iterdir())
    assert pairs(tuner(tmp_path).tuned(*layer)) == [(3, 7)] * 4


def test_a_choice_is_kept_for_one_gpu_one_set_of_versions_and_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    import flashinfer

    def key(topology: Topology | None = None, counts: tuple[int, ...] = COUNTS, **sizes: int) -> TuneKey:
        size = {"hidden_size": H, "intermediate_size": I, "top_k": K} | sizes
        place = topology or Topology()
        config = hostile.make_config(E, *size.values(), activation=GPT_OSS, place=place)
        runner = MoeRunner(MoeBackend.FLASHINFER_MXFP4, MoeA2ABackend.NONE, config)
        experts: Any = SimpleNamespace(format_name="mxfp4")
        return tuning._key(runner, experts, place, counts)

    assert key() == key(counts=(6, 1, 6)), "the order of the counts does not matter"
    keys = [key(), key(hidden_size=128), key(intermediate_size=192), key(top_k=2), key(counts=(1, 8))]
    keys += [key(Topology(ep_size=2)), key(Topology(tp_size=2))]
    for where, attribute, value in (
        (torch, "__version__", "9.9"),
        (flashinfer, "__version__", "9.9"),
        (tuning, "_own_version", lambda: ("moe-serve", "9.9")),
    ):
        monkeypatch.setattr(where, attribute, value)
        keys.append(key())
    assert len({one.file_name for one in keys}) == len(keys)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card of {device}")
    assert (key().gpu, key(Topology(device=torch.device("cuda"))).gpu) == ("cpu", "card of cuda")


def test_a_rank_of_two_keeps_its_own_choice_though_its_sizes_are_those_of_one() -> None:
    """A rank alone with half of the experts sees other tokens per expert: its choice is not this one's."""
    runner = MoeRunner(MoeBackend.TRITON, MoeA2ABackend.NONE, hostile.make_config(E // 2, H, I, 2))
    experts: Any = SimpleNamespace(format_name="mxfp4")
    names = {tuning._key(runner, experts, Topology(ep_size=size), COUNTS).file_name for size in (1, 2)}
    assert len(names) == 2


def test_a_damaged_choice_is_passed_over_without_the_flag_and_replaced_with_it(
    subtests: pytest.Subtests, profiled: Profiled, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layer = mxfp4_layer()
    tuner(tmp_path).tuned(*layer)
    (file,) = tmp_path.iterdir()
    good = file.read_text()
    for text in ("x/6", "3", "-2/6", "3/6/7", "", "3/²", "3/" + "9" * 5000):
        file.write_text(good.replace("3/7", text))
        caplog.clear()
        with subtests.test(text=text), caplog.at_level(logging.WARNING):
            assert tuner(tmp_path, is_on=False).tuned(*layer) is layer[1]
            assert "kept tactics of flashinfer_mxfp4 are not used" in caplog.text
    assert pairs(tuner(tmp_path).tuned(*layer)) == [(3, 7)] * 4
    assert file.read_text() == good


def test_a_start_without_flag_and_file_measures_nothing(profiled: Profiled, tmp_path: Path) -> None:
    layer = mxfp4_layer()
    assert tuner(tmp_path, is_on=False).tuned(*layer) is LayerTuner(TuningSettings()).tuned(*layer) is layer[1]
    assert not profiled.used


def test_a_release_without_profile_numbers(profiled: Profiled, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from moe.backends.flashinfer import common as flashinfer_common

    monkeypatch.setattr(flashinfer_common, "takes", lambda function, parameter: parameter != "profile_ids")
    layer = mxfp4_layer()
    assert tuner(tmp_path).tuned(*layer) is layer[1]
    assert not profiled.used


@rows("format_name", "bf16", "fp8_tensor", "nvfp4")
def test_cutlass_formats(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, format_name: str) -> None:
    install_profiles(monkeypatch, dict(SECONDS), major=10 if format_name == "nvfp4" else 9)
    assert pairs(tuner(tmp_path).tuned(*cutlass_layer(format_name))) == [(3, 7)] * 4


def cutlass_layer(format_name: str) -> Layer:
    experts = hostile.quantized_experts(format_name, E, 256, 128, x=hostile.tokens(8, 256))
    config = hostile.make_config(E, 256, 128, K)
    runner = MoeRunner(MoeBackend.FLASHINFER_CUTLASS, MoeA2ABackend.NONE, config)
    return runner, load_backend(runner.backend).prepare(experts, config, Topology()), experts, Topology()


def test_no_tactics_is_said_once(profiled: Profiled, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = tuner(tmp_path)
    with caplog.at_level(logging.INFO):
        for runner, info, *rest in [cutlass_layer("fp8_block"), mxfp4_layer(MoeBackend.TORCH)] * 2:
            assert one.tuned(runner, info, *rest) is info
            with pytest.raises(MoeConfigError, match="has no tactics"):
                load_backend(runner.backend).with_choice(info, {"1": "3/7"})
    assert [record.message for record in caplog.records if record.name == "moe.tune.layers"] == [
        "--tune: flashinfer_cutlass with fp8_block experts has nothing to tune",
        "--tune: torch with mxfp4 experts has nothing to tune",
    ]
    assert not profiled.used
    assert not list(tmp_path.iterdir())


def test_the_entry_for_benchmarks(profiled: Profiled, caplog: pytest.LogCaptureFixture) -> None:
    def tuned_layer(counts: tuple[int, ...]) -> Any:
        *layer, topology = mxfp4_layer()
        return tune_layer(*layer, topology=topology, token_counts=counts, cache=TuningCache(None))

    with caplog.at_level(logging.INFO):
        tuned = tuned_layer((6, 1, 6))
    assert pairs(tuned) == [(3, 7)] * 4
    assert "tuned flashinfer_mxfp4 for mxfp4 experts of 96 x 160 in" in caplog.text
    assert f"{2 * (1 + 4 + 4)} measurements" in caplog.text
    for counts in ((0, 1), tuple(range(1, MAX_TOKEN_COUNTS + 2))):
        for take in (tuned_layer, lambda counts: TuningSettings(token_counts=counts)):
            with pytest.raises(MoeConfigError, match="at most 8 counts, each at least 1"):
                take(counts)
    with pytest.raises(MoeConfigError, match="tuning needs the token counts"):
        TuningSettings(is_on=True)


def test_compiling_ahead_uses_threads_and_ends_in_time(profiled: Profiled, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = load_backend(MoeBackend.FLASHINFER_MXFP4)
    monkeypatch.setattr(type(backend), "compiles_tactics", True)
    monkeypatch.setattr(tuning_measure, "time", time)
    monkeypatch.setattr(tuning_measure, "_MAX_THREADS", 2)
    threads: list[str] = []
    gate = threading.Event()
    run = MoeRunner.run

    def compile_slowly(self: MoeRunner, dispatched: Any, quant_info: Any) -> Any:
        threads.append(threading.current_thread().name)
        if quant_info.profiles.pick(1) == (4, -1):
            raise RuntimeError("does not compile: told of when it is measured")
        if threading.current_thread() is not threading.main_thread():
            gate.wait(0.5)
        return run(self, dispatched, quant_info)

    monkeypatch.setattr(MoeRunner, "run", compile_slowly)
    measurer = tuning_measure.Measurer(*mxfp4_layer())
    batch = [("-1/-1", 1), ("4/-1", 1), *((f"{number}/-1", count) for count in (6, 1) for number in (1, 2, 3))]
    left = measurer.warm_up(batch, 0.2)
    assert left == batch[len(batch) - len(left) :], "in order"
    assert 0 < len(left) < len(batch) - 1
    assert threads[0] == threading.main_thread().name
    assert len(set(threads)) == 3, "the first by itself, the others side by side"
    gate.set()
    assert measurer.warm_up(left, 60.0) == []
    assert measurer.warm_up(batch, 0.0) == batch, "no time, nothing begun"
    monkeypatch.setattr(type(backend), "compiles_tactics", False)
    assert measurer.warm_up(batch, 0.0) == ()


def test_one_round_is_enough_for_a_tactic_that_is_far_too_slow() -> None:
    def rounds(*seconds: float, fastest: float) -> tuple[float, int]:
        left = list(seconds)
        return tuning_measure._median_round(lambda: left.pop(0), fastest), len(seconds) - len(left)

    assert rounds(5.0, 1.0, 3.0, 2.0, 4.0, fastest=4.0) == (3.0, 5)
    assert rounds(5.0, 1.0, 3.0, 2.0, 4.0, fastest=float("inf")) == (3.0, 5)
    assert rounds(5.0, 1.0, 3.0, 2.0, 4.0, fastest=3.0) == (5.0, 1)


def test_profiles_serve_counts_up_to_their_own_and_the_last_all_above() -> None:
    profiles = profiles_of({"8": "2/6", "1": "0/5"})
    assert [profiles.pick(count) for count in (1, 2, 8, 9)] == [(0, 5), (2, 6), (2, 6), (2, 6)]


# ---- what is measured with and how it is judged ----


def test_an_error_may_not_drown_in_other_tokens_nor_in_other_outputs() -> None:
    want = torch.ones(400, 256)
    want[:, 128:] = 0.01
    assert _largest_error(want, want) == 0
    for part in ((17,), (slice(None), slice(128, None))):
        got = want.clone()
        got[part] *= 2
        assert _largest_error(got, want) == pytest.approx(1)


def test_nan_is_an_infinite_error_and_where_nothing_is_expected_nothing_may_come() -> None:
    want = torch.zeros(3, 128)
    assert _largest_error(want, want) == 0
    assert _largest_error(want + 1e-6, want) == math.inf
    unwritten = torch.ones(3, 128)
    unwritten[2, 5] = math.nan
    assert _largest_error(unwritten, torch.ones(3, 128)) == math.inf


@rows("was_on", False, True)
def test_memory_that_a_tactic_allocates_holds_no_former_results(was_on: bool) -> None:
    torch.use_deterministic_algorithms(was_on)
    try:
        with _new_memory_is_nan():
            assert torch.empty(1000).isnan().all()
        assert torch.are_deterministic_algorithms_enabled() is was_on
    finally:
        torch.use_deterministic_algorithms(False)


@rows("ep_rank", *range(4))
def test_few_tokens_differ_from_call_to_call_and_the_first_visits_this_rank(ep_rank: int) -> None:
    topology = Topology(ep_size=4, ep_rank=ep_rank)
    experts = hostile.shard(make_experts("mxfp4", num_experts=16), ep=(4, ep_rank))
    config = make_config(experts, num_experts=16, dtype=torch.float32, place=topology)
    runner = MoeRunner(MoeBackend.TORCH, MoeA2ABackend.NONE, config)
    info = load_backend(MoeBackend.TORCH).prepare(experts, config, topology)
    measurer = Measurer(runner, info, experts, topology)
    own = set(topology.expert_range(16))
    chosen = [measurer._tokens(1, seed)[1].ids[0].tolist() for seed in range(8)]
    assert all(own & set(ids) for ids in chosen)
    assert own <= {expert for ids in chosen for expert in ids}, "always the same experts would stay in the L2"
    ids = measurer._tokens(64, 0)[1].ids.tolist()
    assert all(len(set(row)) == len(row) for row in ids)
    assert {expert for row in ids for expert in row} == set(range(16))


def test_of_many_tokens_the_compared_ones_are_spread_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    profiled = install_profiles(monkeypatch, {})
    monkeypatch.setattr(tuning_measure, "_CHECKED_TOKENS", 2)
    profiled.wrong.add(3)  # in the last token
    experts = hostile.quantized_experts("bf16", 4, 256, 128, x=hostile.tokens(8, 256))
    config = hostile.make_config(4, 256, 128, 3)
    runner = MoeRunner(MoeBackend.FLASHINFER_CUTLASS, MoeA2ABackend.NONE, config)
    info = load_backend(runner.backend).prepare(experts, config, Topology())
    measurer = Measurer(runner, info, experts, Topology())
    assert measurer.error("2/-1", 6) <= 1 < measurer.error("3/-1", 6)


def test_every_layout_of_a_transport_is_measured_and_compared() -> None:
    experts = make_experts("mxfp4")
    topology = Topology(a2a=MoeA2ABackend.DEEPEP)
    config = make_config(experts, dtype=torch.float32)
    runner = MoeRunner(MoeBackend.TORCH, MoeA2ABackend.DEEPEP, config)
    info = load_backend(MoeBackend.TORCH).prepare(experts, config, topology)
    inputs = Measurer(runner, info, experts, topology)._inputs_for(5)
    both = [DispatchFormat.DEEPEP_NORMAL, DispatchFormat.DEEPEP_LL]
    assert [entry[0] for entry in inputs.first] == both
    assert [dispatched.format for dispatched in inputs.dispatched[:4]] == both * 2
