"""`@rows`: one test for a table of rows. Every row that fails is named, and the rows after it run all the same.

`pytest.mark.parametrize` makes a case of each row, with fixtures of its own; here they are made once for all rows. Only
`monkeypatch` and `tmp_path` are new for every row, `caplog` is empty, and random numbers begin with the same seed.
Several tables, one above the other, give all combinations.
"""

import functools
import inspect
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from tests.seed import seed_torch

Test = Callable[..., None]


def rows(names: str, *table: Any) -> Callable[[Test], Test]:
    """`names` of arguments, separated by commas, and their values: a tuple a row, or the value itself for one name."""

    def decorate(test: Test) -> Test:
        body: Test = getattr(test, "body", test)
        tables = [(names.split(", "), table), *getattr(test, "tables", [])]
        signature = inspect.signature(body)
        taken = {name for each, _ in tables for name in each} | {"subtests"}
        assert taken - {"subtests"} <= signature.parameters.keys(), f"{test.__name__} takes other arguments"
        fixtures = [each for name, each in signature.parameters.items() if name not in taken]

        @functools.wraps(body)
        def run(subtests: pytest.Subtests, **given: Any) -> None:
            passed = {"subtests": subtests} if "subtests" in signature.parameters else {}
            for number, combination in enumerate(itertools.product(*(each for _, each in tables))):
                row: dict[str, Any] = {}
                for (each, _), values in zip(tables, combination, strict=True):
                    row.update(zip(each, values if len(each) > 1 else [values], strict=True))
                with subtests.test(**row), ExitStack() as stack:
                    body(**given | _own(given, number, stack) | passed, **row)

        subtests = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = signature.replace(parameters=[subtests, *fixtures])  # type: ignore[attr-defined]
        run.body, run.tables = body, tables  # type: ignore[attr-defined]
        return run

    return decorate


def _own(given: dict[str, Any], number: int, stack: ExitStack) -> dict[str, Any]:
    """The fixtures that each row has for itself."""
    seed_torch()
    own: dict[str, Any] = {}
    if "caplog" in given:
        given["caplog"].clear()
    if "monkeypatch" in given:
        own["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
    if "tmp_path" in given:
        own["tmp_path"] = given["tmp_path"] / f"row{number}"
        own["tmp_path"].mkdir()
    return own
