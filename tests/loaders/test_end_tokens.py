"""`eos_token_id` of both files: which ids an answer ends with, and which are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from loaders.errors import ModelConfigError
from loaders.hf_config import HfConfig, read_config
from tests.tables import rows


def config_of(folder: Path, raw: dict[str, Any], *, generation_config: dict[str, Any] | None = None) -> HfConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return read_config(folder)


@rows(
    "main, generation, expected",
    (None, None, ()),
    (5, [5, 7], (5, 7)),
    ([3, 4], 9, (3, 4, 9)),
    (0, None, (0,)),
    (None, 2, (2,)),
)
def test_ids_of_both_files(tmp_path: Path, main: Any, generation: Any, expected: tuple[int, ...]) -> None:
    config = config_of(tmp_path, {"eos_token_id": main}, generation_config={"eos_token_id": generation})
    assert config.eos_token_ids == expected


@rows(
    "value, words",
    ("</s>", "must hold ids (whole numbers), found '</s>'"),
    (1.0, "must hold ids (whole numbers), found 1.0"),
    ([5, True], "must hold ids (whole numbers), found [5, True]"),
)
def test_eos_ids_that_the_model_does_not_have_are_refused(tmp_path: Path, value: Any, words: str) -> None:
    """With `min_tokens` they were a 500, with a schema a 400 that blamed it; the message named no file."""
    good = {"eos_token_id": [0, 99]}
    for main, generation, file in (
        (value, good, "config.json"),
        (good["eos_token_id"], None, "generation_config.json"),
    ):
        config = config_of(
            tmp_path,
            {"vocab_size": 100, "eos_token_id": main},
            generation_config=generation or {"eos_token_id": value},
        )
        with pytest.raises(ModelConfigError, match=re.escape(f"{tmp_path / file}: key 'eos_token_id' {words}")):
            _ = config.eos_token_ids


@rows(
    "vocab_size, value, words",
    (100, [200, 100], "holds 100, but this model has ids 0 to 99, by vocab_size of config.json;"),
    (None, -2, "holds -2, but this model has ids 0 and up;"),
)
def test_ids_of_which_the_model_has_none_are_refused(
    tmp_path: Path, vocab_size: int | None, value: Any, words: str
) -> None:
    with pytest.raises(ModelConfigError, match=re.escape(words)):
        _ = config_of(tmp_path, {"vocab_size": vocab_size, "eos_token_id": value}).eos_token_ids


@rows("value, expected", ([5, 200002], (5,)), (-1, ()), ([-1, 7], (7,)))
def test_an_id_that_the_model_never_writes_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: Any, expected: tuple[int, ...]
) -> None:
    """Small models for tests often keep the list of the large one; -1 stands for none."""
    caplog.clear()
    assert config_of(tmp_path, {"vocab_size": 100, "eos_token_id": value}).eos_token_ids == expected
    warned = "config.json: key 'eos_token_id' holds 200002, but this model has ids 0 to 99" in caplog.text
    assert warned == (200002 in ([value] if isinstance(value, int) else value))
