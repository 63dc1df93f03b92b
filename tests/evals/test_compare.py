"""`python -m evals compare`: agreement item by item, its bar, and files that cannot be compared."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from evals.__main__ import main
from tests.tables import rows


def write(path: Path, *rows: tuple[str, str, bool]) -> str:
    lines = [
        json.dumps({"id": row_id, "category": row_id[0], "answer": answer, "correct": good})
        for row_id, answer, good in rows
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["evals", "compare", *arguments])
    return main()


ROWS = [(f"{'ab'[index % 2]}{index}", f"answer {index}", index != 3) for index in range(10)]


@rows("bar, status", ("0.8", 0), ("0.81", 1), ("1", 1), ("0", 0))
def test_the_bar_is_a_share_of_items_with_the_very_same_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, bar: str, status: int
) -> None:
    changed = [*ROWS[:8], ("a8", "answer 8.", True), ("b9", "something", False)]
    first, second = write(tmp_path / "1", *ROWS), write(tmp_path / "2", *reversed(changed))
    assert run(monkeypatch, first, second, "--at-least", bar, "--show", "1") == status
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert (result["items"], result["same_answer"], result["agreement"], result["same_verdict"]) == (10, 8, 0.8, 9)
    assert (result["right_first"], result["right_second"]) == (9, 8)
    assert result["passed"] is (status == 0)
    assert table[0] == "  a8: 'answer 8' -> 'answer 8.'"
    assert [line.split() for line in table[2:]] == [["a", "5", "4", "5"], ["b", "5", "4", "4"]]


@rows("fewer, more", (0, 1), (1, 0))
def test_different_items_cannot_be_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, fewer: int, more: int
) -> None:
    paths = [write(tmp_path / "1", *ROWS), write(tmp_path / "2", *ROWS)]
    write(Path(paths[fewer]), *ROWS[:-1])
    assert run(monkeypatch, *paths, "--at-least", "0") == 2
    error = capsys.readouterr().err
    assert paths[fewer] in error
    assert paths[more] not in error
    assert "lacks 1 of the other's, for example 'b9'" in error


@rows(
    "text, words",
    ("", "holds no answers"),
    ("{}", "line 1 is not a row"),
    ("7", "line 1 is not a row"),
    ("\n", "holds no answers"),
    ("\n\n", "line 1 is not a row"),
    ('{"id": ["a"], "category": "a", "answer": "", "correct": true}', "it lacks id (str)"),
    ('{"id": "a", "category": ["a"], "answer": "", "correct": true}', "it lacks category (str)"),
    ('{"id": "a", "category": "a", "answer": NaN, "correct": true}', "it lacks answer (str)"),
    ('{"id": "a", "category": "a", "answer": "", "correct": "no"}', "it lacks correct (bool)"),
    ('{"id": "a", "category": "a", "answer": "", "correct": true}\n' * 2, "line 2: item 'a' is there twice"),
)
def test_files_that_hold_no_answers_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Any, words: Any
) -> None:
    (tmp_path / "1").write_text(text)
    assert run(monkeypatch, str(tmp_path / "1"), write(tmp_path / "2", *ROWS)) == 2
    assert words in capsys.readouterr().err


def test_a_file_that_is_no_text_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "1").write_bytes(b"\xff\xfe")
    assert run(monkeypatch, str(tmp_path / "1"), write(tmp_path / "2", *ROWS)) == 2
    assert f"{tmp_path / '1'} is not UTF-8 text" in capsys.readouterr().err


def test_an_answer_may_hold_any_separator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    row = {"id": "a", "category": "a", "answer": "one\u2028two\x85three", "correct": True}
    (tmp_path / "1").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert run(monkeypatch, str(tmp_path / "1"), str(tmp_path / "1"), "--at-least", "1") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["items"] == 1


def test_a_missing_file_and_a_bar_out_of_range_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write(tmp_path / "1", *ROWS)
    assert run(monkeypatch, path, str(tmp_path / "nowhere")) == 2
    assert "nowhere" in capsys.readouterr().err
    assert run(monkeypatch, path, path, "--at-least", "98") == 2
    assert "--at-least is 98.0" in capsys.readouterr().err
