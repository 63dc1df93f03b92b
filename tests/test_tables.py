"""`@rows` runs every row, names those that fail, and gives each row what it may change."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tables import rows


class Recorder:
    """Stands in for `subtests`: keeps the rows, and those that failed."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.failed: list[dict[str, Any]] = []

    @contextmanager
    def test(self, **row: Any) -> Iterator[None]:
        self.rows.append(row)
        try:
            yield
        except AssertionError:
            self.failed.append(row)


def test_every_row_runs_and_those_that_fail_are_named() -> None:
    @rows("a, b", (1, 1), (1, 2), (3, 4), (5, 5))
    def equal(a: int, b: int) -> None:
        assert a == b

    equal(subtests := Recorder())
    assert subtests.failed == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    assert len(subtests.rows) == 4


def test_tables_above_each_other_give_all_combinations_and_rows_share_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @rows("x", 1, 2)
    @rows("pair", (3, 4), (5, 6))
    def clean(x: int, pair: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "ROW" not in os.environ
        monkeypatch.setenv("ROW", f"{x} {pair}")
        (tmp_path / "new").mkdir()

    clean(subtests := Recorder(), tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert [(row["x"], row["pair"]) for row in subtests.rows] == [(1, (3, 4)), (1, (5, 6)), (2, (3, 4)), (2, (5, 6))]
    assert subtests.failed == []
    with pytest.raises(AssertionError, match="takes other arguments"):
        rows("y", 1)(clean)
