"""JSON of model files. Whatever is wrong with it, the error is a ValueError, which every reader turns into its own."""

import json
from collections.abc import Callable
from typing import Any


def parse_json(data: bytes | str, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The parsed text.

    Raises:
        ValueError: not UTF-8, not JSON, a number of too many digits, or nested too deeply; also what the hook raises.
    """
    try:
        return json.loads(data, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
