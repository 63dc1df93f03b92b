"""The bundled models: every listed folder is complete, and no other is there; all files stay small."""

import json
from pathlib import Path

import pytest

from server.errors import SettingError
from server.model_source import BUNDLED_MODELS, bundled_models, check_model_folder, locate_model

SOURCE_FILES = ("README.md", "chat_template.jinja", "generation_config.json", "model.safetensors")


def test_the_list_is_what_assets_holds() -> None:
    assert {path.name for path in bundled_models().iterdir()} == set(BUNDLED_MODELS)


def test_every_bundled_model_is_found_by_name_and_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in BUNDLED_MODELS:
        folder = locate_model(name)
        assert isinstance(folder, Path)
        check_model_folder(folder)
        assert all((folder / file).is_file() for file in SOURCE_FILES), name
        assert json.loads((folder / "config.json").read_text())["architectures"]
        assert max(path.stat().st_size for path in folder.iterdir()) <= 16_000_000


def test_an_unknown_name_is_told_the_bundled_ones() -> None:
    with pytest.raises(SettingError, match=r"one of the bundled models: tiny-gpt-oss"):
        locate_model("tiny-nothing")
