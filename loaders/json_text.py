"""JSON of model files. Whatever is wrong with it, the error is a ValueError, which every reader turns into its own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loaders.optional_file import is_there


def parse_json(data: bytes | str, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The parsed text.

    Raises:
        ValueError: not UTF-8, not JSON, a number of too many digits, or nested too deeply; also what the hook raises.
    """
    try:
        return json.loads(data, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_optional_object(path: Path, error: Callable[[str], Exception]) -> dict[str, Any] | None:
    """Like `read_object`, but None if the file is not there."""
    return read_object(path, error) if is_there(path, error) else None


def read_object(path: Path, error: Callable[[str], Exception]) -> dict[str, Any]:
    """The object that a file holds. What is wrong with the file is raised as `error`, which gets the message."""
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as cause:
        raise error(f"{path}: cannot be read as JSON: {cause}") from cause
    if not isinstance(value, dict):
        raise error(f"{path}: must hold a JSON object")
    return value
