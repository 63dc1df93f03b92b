"""G68: `--tune` enters FlashInfer's own autotune context for kernels whose tactics it keeps, never for CuTe-DSL v1."""

import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe import MoeA2ABackend, MoeBackend, MoeRunner, Topology
from moe.config import RoutingConfig, RoutingMethod
from moe.formats import ExpertWeights
from moe.registry import load_backend
from moe.routing import BypassedTopK, StandardTopK
from moe.tune.layers import LayerTuner, TuningSettings
from tests.emulators.cutedsl import install_cutedsl
from tests.emulators.device import import_flashinfer
from tests.emulators.trtllm import install_trtllm
from tests.moe.backends import cutedsl_cases, hostile
from tests.tables import rows

E, K, H, I = 8, 2, 256, 128
NONE, DEEPEP = MoeA2ABackend.NONE, MoeA2ABackend.DEEPEP
RULES = RoutingConfig(
    method=RoutingMethod.SIGMOID_GROUPED, num_experts=E, top_k=K, num_groups=4, num_kept_groups=2,
    routed_scaling_factor=2.5,
)  # fmt: skip
Layer = tuple[MoeRunner, Any, ExpertWeights, Topology]


class Spy:
    """FlashInfer's `autotune`: how often and how it was entered, and what the layers ran inside and outside of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import_flashinfer()
        import flashinfer

        self.entered: list[tuple[bool, str | None]] = []
        self.is_open = False
        self.runs: list[tuple[bool, Any]] = []
        signature = inspect.signature(flashinfer.autotune)

        @contextlib.contextmanager
        def autotune(*arguments: Any, **options: Any) -> Iterator[None]:
            bound = signature.bind(*arguments, **options).arguments
            self.entered.append((bound["tune_mode"], bound.get("cache")))
            self.is_open = True
            yield
            self.is_open = False
            if bound["tune_mode"] and "cache" in bound:
                Path(bound["cache"]).write_text("{}")

        autotune.__signature__ = signature  # type: ignore[attr-defined]
        monkeypatch.setattr(flashinfer, "autotune", autotune)
        run = MoeRunner.run

        def noting(runner: MoeRunner, dispatched: Any, info: Any) -> Any:
            self.runs.append((self.is_open, dispatched))
            return run(runner, dispatched, info)

        monkeypatch.setattr(MoeRunner, "run", noting)


def trtllm_layer(name: str) -> Layer:
    experts = hostile.quantized_experts(name, E, H, I, x=hostile.tokens(8, H, size=3.0))
    config = hostile.make_config(E, H, I, K, routing=RULES)
    return layer_of(MoeBackend.FLASHINFER_TRTLLM, NONE, config, experts)


def mxfp4_layer() -> Layer:
    config = hostile.make_config(E, H, I, K)
    return layer_of(MoeBackend.FLASHINFER_MXFP4, NONE, config, hostile.plain_experts("mxfp4", E, H, I))


def cutedsl_layer(a2a: MoeA2ABackend) -> Layer:
    experts = cutedsl_cases.make_experts()
    config = dataclasses.replace(cutedsl_cases.config_for(experts), max_num_tokens=16)
    return layer_of(MoeBackend.FLASHINFER_CUTEDSL, a2a, config, experts)


def layer_of(backend: MoeBackend, a2a: MoeA2ABackend, config: Any, experts: ExpertWeights) -> Layer:
    topology, experts = Topology(a2a=a2a), hostile.with_layer_scales(experts, experts)
    formats = {"dispatch_formats": cutedsl_cases.LL_ONLY} if a2a is DEEPEP else {}
    info = load_backend(backend).prepare(experts, config, topology)
    return MoeRunner(backend, a2a, config, **formats), info, experts, topology


def tuner(folder: Path | None, *, is_on: bool = True) -> LayerTuner:
    return LayerTuner(TuningSettings(is_on=is_on, cache_folder=folder, token_counts=(1, 4)))


LAYERS = {
    "cutedsl": lambda: cutedsl_layer(NONE), "cutedsl-flashinfer": lambda: cutedsl_layer(MoeA2ABackend.FLASHINFER),
    "mxfp4": mxfp4_layer,
} | {name: functools.partial(trtllm_layer, name) for name in ("fp8_block", "fp8_tensor", "nvfp4")}  # fmt: skip


@rows("path", *LAYERS)
def test_a_layer_runs_once_inside_the_librarys_context(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """Once for all layers of a shape, at the largest count, routed as a served step is; later starts read the file."""
    (install_cutedsl if path.startswith("cutedsl") else install_trtllm)(monkeypatch)
    spy = Spy(monkeypatch)
    layer = LAYERS[path]()
    kept = str(tmp_path / "new" / "flashinfer-rank0.json")
    one = tuner(tmp_path / "new")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert one.tuned(*layer) is layer[1]
    assert spy.entered == [(True, kept)]
    ((is_open, dispatched),) = spy.runs
    assert is_open
    assert "tuned itself" in caplog.text
    assert "nothing to tune" not in caplog.text
    if not path.endswith("flashinfer"):
        assert dispatched.hidden_states.shape[0] == 4
        kind = BypassedTopK if load_backend(layer[0].backend).routes_inside else StandardTopK
        assert isinstance(dispatched.topk_output, kind)
    later = tuner(tmp_path / "new", is_on=False)
    for _ in range(2):
        assert later.tuned(*layer) is layer[1]
    assert spy.entered[1:] == [(False, kept)]
    assert len(spy.runs) == 1, "a start without the flag measures nothing"


def test_v1_never_enters_the_context(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install_cutedsl(monkeypatch)
    spy = Spy(monkeypatch)
    layer = cutedsl_layer(DEEPEP)
    (tmp_path / "flashinfer-rank0.json").write_text("{}")
    with caplog.at_level(logging.INFO):
        for is_on in (True, False):
            assert tuner(tmp_path, is_on=is_on).tuned(*layer) is layer[1]
    assert (spy.entered, spy.runs) == ([], [])
    assert "flashinfer_cutedsl with nvfp4 experts has nothing to tune" in caplog.text
    assert load_backend(MoeBackend.FLASHINFER_CUTEDSL).library_tuning(layer[1]) is None


def test_without_a_folder_or_a_file_nothing_is_kept_or_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_trtllm(monkeypatch)
    spy = Spy(monkeypatch)
    layer = trtllm_layer("fp8_block")
    assert tuner(tmp_path, is_on=False).tuned(*layer) is layer[1]
    assert spy.entered == []
    tuner(None).tuned(*layer)
    (tmp_path / "file").write_text("")
    tuner(tmp_path / "file" / "folder").tuned(*layer)
    assert spy.entered == [(True, None)] * 2


def test_the_real_context_opens_and_reads_on_a_cpu(tmp_path: Path) -> None:
    """The library's own function takes what we give it, and tells its kernels that they are tuned."""
    import_flashinfer()
    from flashinfer.autotuner import AutoTuner

    from moe.backends.flashinfer import common

    for measure in (True, False):
        with common.tuning_context(tmp_path / "file.json", measure=measure):
            assert AutoTuner.get().is_tuning_mode == measure
    assert not AutoTuner.get().is_tuning_mode


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Layers compute nothing; for each run, whether the library measured."""
    import_flashinfer()
    from flashinfer.autotuner import AutoTuner

    measured: list[bool] = []
    monkeypatch.setattr(MoeRunner, "run", lambda *arguments: measured.append(AutoTuner.get().is_tuning_mode))
    return measured


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch, modes: list[bool]) -> Layer:
    """A layer that computes nothing, for the library's own context, which has news to write when it ends."""
    install_trtllm(monkeypatch)
    from flashinfer.autotuner import AutoTuner

    monkeypatch.setattr(AutoTuner.get(), "_dirty", True)
    return trtllm_layer("fp8_block")


@rows("is_on", True, False)
@rows("content", '{"a": ', "[]", '{"a": 5}', '{"a": []}', '{"a": [5, 1]}', "\udcff")
def test_a_damaged_file_is_named_once_and_not_used(
    real: Layer, modes: list[bool], tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str, is_on: bool
) -> None:
    """It ended every start with a message that named nothing."""
    file = tmp_path / "flashinfer-rank0.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    one = tuner(tmp_path, is_on=is_on)
    caplog.clear()
    modes.clear()
    for _ in range(2):
        assert one.tuned(*real) is real[1]
    assert caplog.text.count(f"{file} cannot be read") == 1
    assert modes == [True] * is_on
    assert file.read_bytes() == content.encode(errors="surrogateescape")


def test_tactics_that_cannot_be_written_are_measured_all_the_same(
    real: Layer, modes: list[bool], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "flashinfer-rank0.json"
    file.mkdir()
    assert tuner(tmp_path).tuned(*real) is real[1]
    assert f"{file} cannot be written" in caplog.text
    assert modes == [True]


@rows("error", OSError("no"), ValueError("no"))
def test_errors_of_the_measurement_are_not_taken_for_those_of_the_file(
    monkeypatch: pytest.MonkeyPatch, real: Layer, tmp_path: Path, error: Exception
) -> None:
    def fail(runner: MoeRunner, dispatched: Any, info: Any) -> Any:
        raise error

    monkeypatch.setattr(MoeRunner, "run", fail)
    with pytest.raises(type(error), match="no"):
        tuner(tmp_path).tuned(*real)
