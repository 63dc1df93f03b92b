"""`@rows`: one test that runs every row of a table as a subtest; it names all rows that fail, not only the first."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

Test = Callable[..., None]


def rows(names: str, values: Iterable[Any]) -> Callable[[Test], Test]:
    """Run the test once for each of `values`, which holds a tuple for several `names`; stacked tables multiply.

    Each row starts as a test of its own would: with its own patches and folder, an empty log, the same random numbers.
    """
    columns = [name.strip() for name in names.split(",")]
    table = [dict(zip(columns, row if len(columns) > 1 else (row,), strict=True)) for row in values]
    if not table:
        return pytest.mark.skip("no rows")

    def decorate(test: Test) -> Test:
        inner, tables = getattr(test, "rows", (test, ()))
        tables = (table, *tables)

        wanted = inspect.signature(inner).parameters

        @functools.wraps(inner)
        def run(subtests: pytest.Subtests, **fixtures: Any) -> None:
            if "subtests" in wanted:
                fixtures["subtests"] = subtests
            products = [{key: value for row in product for key, value in row.items()}
                        for product in itertools.product(*tables)]  # fmt: skip
            for number, row in enumerate(products):
                with subtests.test(**row), pytest.MonkeyPatch.context() as patch:
                    inner(**row, **_fresh(fixtures, patch, number))

        kept = [value for name, value in wanted.items()
                if name != "subtests" and not any(name in table[0] for table in tables)]  # fmt: skip
        subtests = inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = inspect.Signature([*kept, subtests])  # type: ignore[attr-defined]
        run.rows = (inner, tables)  # type: ignore[attr-defined]
        return run

    return decorate


def _fresh(fixtures: dict[str, Any], patch: pytest.MonkeyPatch, number: int) -> dict[str, Any]:
    """The fixtures of one row."""
    torch.manual_seed(0)
    changes: dict[str, Any] = {}
    if "monkeypatch" in fixtures:
        changes["monkeypatch"] = patch
    if "tmp_path" in fixtures:
        folder: Path = fixtures["tmp_path"] / str(number)
        folder.mkdir()
        changes["tmp_path"] = folder
    if "caplog" in fixtures:
        fixtures["caplog"].clear()
    return fixtures | changes
