"""`tune` and `tune_cache_dir`: from the engine's settings to the layers, and a device that has nothing to tune."""

import logging
from pathlib import Path
from typing import Any

import pytest

from engine import load
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineConfigError
from model import moe_build, registry
from model.config import ModelSettings
from moe.tune.layers import LayerTuner, TuningSettings

FOLDER = Path(__file__).parents[2] / "assets" / "tiny-gpt-oss"
NUM_LAYERS = 6


def config(**settings: Any) -> EngineConfig:
    fields = {"device": "cpu", "num_pages": 64, "num_threads": 1, "selfcheck": "off"} | settings
    return EngineConfig(model=FOLDER, **fields)


def settings_of(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> TuningSettings:
    """What the model would be built with."""
    seen: list[ModelSettings] = []

    def build_model(folder: Path, settings: ModelSettings, *_rest: Any, **_named: Any) -> Any:
        seen.append(settings)
        raise EngineConfigError("far enough")

    monkeypatch.setattr(registry, "build_model", build_model)
    with pytest.raises(EngineConfigError, match="far enough"):
        load.load_engine(config(**fields), None)
    return seen[0].tuning


def test_every_step_the_scheduler_can_make_is_covered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tuning = settings_of(monkeypatch, tune=True, tune_cache_dir=tmp_path, max_num_batched_tokens=2048, max_num_seqs=64)
    assert tuning == TuningSettings(is_on=True, cache_folder=tmp_path, token_counts=(1, 4, 8, 16, 64, 256, 512, 2048))
    assert tuning.budget_s < 60


def test_by_default_nothing_is_measured_but_what_is_kept_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = settings_of(monkeypatch)
    assert not tuning.is_on
    assert tuning.cache_folder is None
    assert tuning.token_counts[-1] == 512


def test_every_layer_is_offered_to_the_tuner_before_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    check_layer = moe_build.check_layer

    def tuned(self: LayerTuner, runner: Any, info: Any, experts: Any, topology: Any) -> Any:
        order.append("tune")
        return info

    def checked(*args: Any, **kwargs: Any) -> Any:
        order.append("check")
        return check_layer(*args, **kwargs)

    monkeypatch.setattr(LayerTuner, "tuned", tuned)
    monkeypatch.setattr(moe_build, "check_layer", checked)
    EngineCore(config(selfcheck="all"))
    assert order == ["tune", "check"] * NUM_LAYERS


def test_on_a_cpu_tuning_says_that_there_is_nothing_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="moe.tune.layers"):
        EngineCore(config(tune=True, tune_cache_dir=tmp_path / "cache"))
    messages = [record.message for record in caplog.records if record.name == "moe.tune.layers"]
    assert messages == ["--tune: torch with mxfp4 experts has nothing to tune"]
    assert not (tmp_path / "cache").exists()
