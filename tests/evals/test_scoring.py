"""How answers are judged."""

from typing import Any

import pytest

from evals.scoring import is_right
from tests.tables import rows


@rows(
    "check, text, right",
    ({"kind": "number", "value": 579}, "123 + 456 = 579.", True),
    ({"kind": "number", "value": 1579}, "It is 1,579.", True),
    ({"kind": "number", "value": -4}, "3 - 7 = -4.", True),
    ({"kind": "number", "value": 579}, "579 + 1 = 580.", False),
    ({"kind": "number", "value": 579}, "", False),
    ({"kind": "contains", "values": ["Paris"]}, "the capital is paris.", True),
    ({"kind": "contains", "values": ["Paris"]}, "Parisian", False),
    ({"kind": "contains", "values": ["English", "French"]}, "English.", False),
    ({"kind": "list", "items": ["3", "12", "105"]}, "3, 12, 105", True),
    ({"kind": "list", "items": ["3", "12", "105"]}, "3, 105, 12", False),
    ({"kind": "list", "items": ["3", "12"]}, "3, 12, 12", False),
    ({"kind": "text", "value": "olleh"}, '"olleh".', True),
    ({"kind": "text", "value": "olleh"}, "it is olleh", False),
)
def test_texts(check: Any, text: Any, right: Any) -> None:
    assert is_right(check, text, []) is right
    assert not is_right(check, text, [("f", "{}")])  # a call is no answer


WANTED = {"kind": "call", "name": "f", "arguments": {"a": 1, "b": ["x"], "c": True}}


def test_calls() -> None:
    for name, arguments, right in [
        ("f", '{"c": true, "b": ["x"], "a": 1}', True),
        ("f", '{"a": 1.0, "b": ["x"], "c": true}', True),
        ("g", '{"a": 1, "b": ["x"], "c": true}', False),
        ("f", '{"a": 1, "b": ["x"], "c": 1}', False),
        ("f", '{"a": "1", "b": ["x"], "c": true}', False),
        ("f", '{"a": 1, "b": ["x"]}', False),
        ("f", '{"a": 1, "b": ["x"], "c": true, "d": 0}', False),
        ("f", '{"a": 1, "b": ["x"], "c": tr', False),
        ("f", "[]", False),
    ]:
        assert is_right(WANTED, "", [(name, arguments)]) is right, (name, arguments, right)


def test_one_call_only() -> None:
    good = ("f", '{"a": 1, "b": ["x"], "c": true}')
    assert not is_right(WANTED, "", [good, good])
    assert not is_right(WANTED, "f", [])


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="guess"):
        is_right({"kind": "guess"}, "", [])
