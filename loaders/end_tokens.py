"""The ids of the tokens that end an answer: `eos_token_id` of config.json and of generation_config.json together."""

import logging
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loaders.errors import ModelConfigError
from loaders.json_text import read_optional_object

_KEY = "eos_token_id"
_NONE = -1

logger = logging.getLogger(__name__)


def read_end_token_ids(folder: Path) -> tuple[int, ...]:
    """The ids that the files of a folder name; a file that is missing names none. Raises as `end_token_ids` does."""
    config = read_optional_object(folder / "config.json", ModelConfigError)
    generation = read_optional_object(folder / "generation_config.json", ModelConfigError)
    return end_token_ids(folder, config or {}, generation or {})


def end_token_ids(folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids in the contents of config.json and generation_config.json, each once.

    An id beyond the vocabulary is left out with a warning, since the model never writes it; -1 stands for none.

    Raises:
        ModelConfigError: not ids, or none of them is one that the model has; names file and key.
    """
    limit = stated_vocab_size(config)
    ids: dict[int, None] = {}
    unknown = ""
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        value = content.get(_KEY)
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            where = f"{folder / name}: key '{_KEY}'"
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise ModelConfigError(f"{where} must hold ids (whole numbers), found {reprlib.repr(value)}")
            if token_id >= 0 and (limit is None or token_id < limit):
                ids[token_id] = None
            elif token_id != _NONE:
                known = "0 and up" if limit is None else f"0 to {limit - 1}, by vocab_size of config.json"
                unknown = f"{where} holds {reprlib.repr(token_id)}, but this model has ids {known}"
                logger.warning("%s: this id is left out", unknown)
    if unknown and not ids:
        raise ModelConfigError(f"{unknown}; take the file that belongs to this model, or remove the id")
    return tuple(ids)


def stated_vocab_size(config: Mapping[str, Any]) -> int | None:
    """`vocab_size` of config.json; None if it has none that is a size, which the model refuses, and says so better."""
    value = config.get("vocab_size")
    return value if type(value) is int and value > 0 else None
