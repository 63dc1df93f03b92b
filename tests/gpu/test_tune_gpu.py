"""Tuning on a real card: right results, a written cache that a second start uses, seconds taken. Needs a Hopper GPU."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from moe import Activation, MoeBackend, StandardDispatchOutput, Topology
from moe.check.reference import reference_moe
from moe.formats import Bf16Weight, ExpertWeights, Fp8BlockWeight, Mxfp4Weight, Weight
from moe.registry import load_backend
from moe.tune.cache import TuningCache
from moe.tune.layers import LayerTuner, TuningSettings, tune_layer
from moe.tune.measure import Measurer
from moe.tune.policy import tuning_token_counts
from tests.gpu.common import DEVICE, GPT_OSS, WEIGHT_ONLY, experts_of, make_runner, tokens_and_routing

pytestmark = pytest.mark.gpu

COUNTS = tuning_token_counts(4096, 64)
NUM_EXPERTS, SIZE = 32, 2880


def layer(backend: MoeBackend, kind: type[Weight]) -> tuple[Any, Any, ExpertWeights]:
    experts = experts_of(kind, NUM_EXPERTS, SIZE, SIZE, True)
    runner, config = make_runner(backend, experts, GPT_OSS, NUM_EXPERTS)
    return runner, load_backend(backend).prepare(experts, config, Topology(device=DEVICE)), experts


def error_of(runner: Any, info: Any, experts: ExpertWeights, num_tokens: int) -> float:
    """Against the twin; a CUDA graph must give the same bits."""
    x, topk = tokens_and_routing(num_tokens, SIZE, NUM_EXPERTS)
    got = runner.run(StandardDispatchOutput(x, topk), info).hidden_states
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = runner.run(StandardDispatchOutput(x, topk), info).hidden_states
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, got)
    want = reference_moe(x, topk, experts, GPT_OSS)
    return float((got.float() - want).norm() / want.norm())


def tell(capsys: pytest.CaptureFixture[str], measurer: Measurer, untuned: Any, choice: dict[str, str]) -> None:
    """One line for each token count: microseconds before and after, and what was chosen."""
    with capsys.disabled():
        for count in COUNTS:
            before, after = (1e6 * measurer.seconds(tactic, count) for tactic in (untuned(count), choice[str(count)]))
            print(f"  {count:5d} tokens: {before:8.1f} us untuned, {after:8.1f} us tuned: {choice[str(count)]}")


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        (MoeBackend.TRITON, Mxfp4Weight),
        (MoeBackend.FLASHINFER_MXFP4, Mxfp4Weight),
        (MoeBackend.FLASHINFER_CUTLASS, Bf16Weight),
    ],
)
def test_a_layer_is_tuned_right_and_only_once(
    backend: MoeBackend,
    kind: type[Weight],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topology = Topology(device=DEVICE)
    runner, info, experts = layer(backend, kind)
    start = time.monotonic()
    tuned = tune_layer(
        runner, info, experts, topology=topology, token_counts=COUNTS, cache=TuningCache(tmp_path / "cache")
    )
    seconds = time.monotonic() - start
    (file,) = (tmp_path / "cache").iterdir()
    choice = json.loads(file.read_text())["choice"]
    assert list(choice) == [str(count) for count in COUNTS]
    with capsys.disabled():
        print(f"\n{backend} {experts.format_name}: tuned {len(COUNTS)} token counts in {seconds:.1f} s")

    def untuned(count: int) -> str:
        first: str = load_backend(backend).tactics(info, runner.config, count, {})[0]
        return first

    tell(capsys, Measurer(runner, info, experts, topology), untuned, choice)
    for num_tokens in (1, 3, 4, 17, 64, 257, 1024, 4096, 5000):
        assert error_of(runner, tuned, experts, num_tokens) < WEIGHT_ONLY

    def measured(self: Measurer, tactic: str, num_tokens: int) -> float:
        raise AssertionError("a second start measures nothing")

    monkeypatch.setattr(Measurer, "seconds", measured)
    for is_on in (True, False):
        later = LayerTuner(TuningSettings(is_on=is_on, cache_folder=tmp_path / "cache", token_counts=COUNTS))
        again = later.tuned(runner, info, experts, topology)
        name = "plans" if backend is MoeBackend.TRITON else "profiles"
        assert getattr(again, name) == getattr(tuned, name) != getattr(info, name)


def test_fp8_blocks_on_cutlass_have_nothing_to_tune(tmp_path: Path) -> None:
    w13 = Fp8BlockWeight.quantize(torch.randn(4, 512, 256, device=DEVICE))
    experts = ExpertWeights(w13=w13, w2=Fp8BlockWeight.quantize(torch.randn(4, 256, 256, device=DEVICE)))
    runner, config = make_runner(MoeBackend.FLASHINFER_CUTLASS, experts, Activation(), 4)
    info = load_backend(MoeBackend.FLASHINFER_CUTLASS).prepare(experts, config, Topology(device=DEVICE))
    tuner = LayerTuner(TuningSettings(is_on=True, cache_folder=tmp_path, token_counts=COUNTS))
    assert tuner.tuned(runner, info, experts, Topology(device=DEVICE)) is info
