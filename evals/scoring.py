"""Scores one answer against what an eval item expects. Pure functions over text; no model, no server."""

from __future__ import annotations

import json
import re
from typing import Any


def numbers_in(text: str) -> list[int]:
    """Whole numbers in a text, thousands separators removed."""
    return [int(found.replace(",", "")) for found in re.findall(r"-?\d{1,3}(?:,\d{3})+|-?\d+", text)]


def contains(text: str, value: str) -> bool:
    """True if `text` contains `value` as whole words, in upper or lower case."""
    return re.search(rf"(?<!\w){re.escape(value.lower())}(?!\w)", text.lower()) is not None


def listed(text: str) -> list[str]:
    """The numbers and words of an answer that is a list, in order."""
    return re.findall(r"[\w-]+", text.lower())


def same_value(found: Any, wanted: Any) -> bool:
    """Equal JSON values; 3 and 3.0 are the same, true and 1 are not."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, (int, float)) and isinstance(wanted, (int, float)):
        return float(found) == float(wanted)
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same_value, found, wanted))
    return bool(found == wanted)


def right_call(calls: list[tuple[str, str]], name: str, arguments: dict[str, Any]) -> bool:
    """True for exactly one call: the right function with exactly the right arguments."""
    if len(calls) != 1 or calls[0][0] != name:
        return False
    try:
        found = json.loads(calls[0][1])
    except ValueError:
        return False
    return (
        isinstance(found, dict)
        and found.keys() == arguments.keys()
        and all(same_value(found[key], arguments[key]) for key in arguments)
    )


def is_right(check: dict[str, Any], text: str, calls: list[tuple[str, str]]) -> bool:
    """Whether an answer passes its check. `text` is the final content, `calls` the (name, arguments as JSON) pairs.

    Kinds of check: number (the last number in the answer), contains (every value), list (these items in this order),
    text (the value and nothing else), call. Raises ValueError for another kind.
    """
    kind = check["kind"]
    if kind == "call":
        return right_call(calls, check["name"], check["arguments"])
    if calls:
        return False
    if kind == "number":
        return numbers_in(text)[-1:] == [check["value"]]
    if kind == "contains":
        return all(contains(text, value) for value in check["values"])
    if kind == "list":
        return listed(text) == [item.lower() for item in check["items"]]
    if kind == "text":
        return text.strip().strip("\"'.").lower() == check["value"].lower()
    raise ValueError(f"check kind {kind!r} is none of number, contains, list, text, call")
