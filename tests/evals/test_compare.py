"""`python -m evals compare`: the verdict and the bars, and runs that cannot be compared."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from evals.__main__ import main
from evals.results import Item, Run
from tests.tables import rows


def items(*scores: float, answer: str = "answer") -> list[Item]:
    return [
        Item(id=f"{'ab'[i % 2]}{i}", category="ab"[i % 2], prompt=f"question {i}", answer=f"{answer} {i}", score=score)
        for i, score in enumerate(scores)
    ]


def write(path: Path, found: list[Item], eval_name: str = "tiny", **settings: Any) -> str:
    Run(eval=eval_name, settings=settings, server={"model": path.name}, items=found).write(path)
    return str(path)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["evals", "compare", *arguments])
    return main()


@rows(
    "first, second, flags, status, p",
    ([1] * 10, [1] * 10, [], 0, 1.0),
    ([1] * 10, [0] * 5 + [1] * 5, [], 0, 0.0625),  # 2 / 2**5
    ([1] * 10, [0] * 6 + [1] * 4, [], 1, 0.03125),  # 2 / 2**6
    ([1] * 10, [0] * 6 + [1] * 4, ["--alpha", "0.03"], 0, 0.03125),
    ([1] * 10, [0] * 10, ["--alpha", "0"], 0, 2 / 2**10),
    ([1, 0] * 10, [0, 1] * 10, [], 0, 1.0),  # as many better as worse
)
def test_right_or_wrong_is_judged_by_mcnemars_exact_test(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, first: list[int],
    second: list[int], flags: list[str], status: int, p: float,
) -> None:  # fmt: skip
    paths = write(tmp_path / "1", items(*first)), write(tmp_path / "2", items(*second))
    assert run(monkeypatch, *paths, *flags) == status
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["p"], result["passed"], result["test"]) == (p, status == 0, "McNemar, exact")
    assert result["differs"] is (status == 1)


@rows("shift, status", (0.0, 0), (0.2, 1), (-0.2, 1))
def test_other_scores_are_judged_by_a_paired_bootstrap(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, shift: float, status: int
) -> None:
    first = [0.3 + 0.01 * (i % 5) for i in range(40)]
    second = [score + shift + 0.02 * (-1) ** i for i, score in enumerate(first)]
    paths = write(tmp_path / "1", items(*first)), write(tmp_path / "2", items(*second))
    assert run(monkeypatch, *paths) == status
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["test"] == "paired bootstrap"
    assert result["low"] <= result["difference"] <= result["high"]
    assert result["difference"] == pytest.approx(shift)


@rows("bar, status", ("0.8", 0), ("0.81", 1), ("1", 1), ("0", 0))
def test_a_bar_may_ask_for_the_very_same_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, bar: str, status: int
) -> None:
    whole = items(*[1] * 10)
    changed = [*whole[:8], *items(*[1] * 9, 0, answer="other")[8:]]
    paths = write(tmp_path / "1", whole), write(tmp_path / "2", changed[::-1])
    assert run(monkeypatch, *paths, "--at-least", bar, "--show", "1") == status
    *table, _, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert (result["items"], result["same_answer"], result["agreement"], result["same_verdict"]) == (10, 8, 0.8, 9)
    assert (result["right_first"], result["right_second"]) == (10, 9)
    assert table[0] == "  a8: 'answer 8' (1) -> 'other 8' (1)"
    assert [line.split()[0] + line.split()[-1] for line in table[2:]] == ["a4", "b4", "all8"]


@rows(
    "change, words",
    ({"items": items(1, 1)}, "lacks 1 of the other's, for example 'a2'"),
    ({"items": items(1, 1, 1, 1)}, "lacks 1 of the other's, for example 'b3'"),
    ({"items": [*items(1, 1), Item(id="a2", category="a", prompt="?", answer="", score=1)]}, "'a2' asks or expects"),
    ({"settings": {"max_tokens": 9}}, "max_tokens is 8 in "),
    ({"settings": {"max_tokens": 8, "seed": 1}}, "seed is None in "),
    ({"eval": "gsm8k"}, "of tiny and "),
)
def test_runs_of_other_items_or_settings_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, change: dict[str, Any],
    words: str,
) -> None:  # fmt: skip
    own = {"eval": "tiny", "settings": {"max_tokens": 8}, "server": {}, "items": items(1, 1, 1)}
    Run(**own).write(tmp_path / "1")
    Run(**own | change).write(tmp_path / "2")
    assert run(monkeypatch, str(tmp_path / "1"), str(tmp_path / "2")) == 2
    assert words in capsys.readouterr().err


WHOLE = {"eval": "tiny", "settings": {}, "server": {}}
ROW = {"id": "a", "category": "a", "prompt": "", "answer": "", "score": 1}


@rows(
    "content, words",
    ("", "is not a run"),
    ("[" * 100_000, "is not a run"),
    ("{}", "it needs eval, settings, server and items"),
    (json.dumps(WHOLE | {"items": []}), "holds no items"),
    (json.dumps(WHOLE | {"items": [7]}), "item 1 has no id"),
    (json.dumps(WHOLE | {"items": [ROW | {"score": "1"}]}), "item 1 has no score"),
    (json.dumps(WHOLE | {"items": [ROW, ROW]}), "'a' is there twice"),
    (json.dumps(WHOLE | {"items": [ROW | {"score": math.nan}]}), "item 1 has the score nan: it must lie between 0"),
    (json.dumps(WHOLE | {"items": [ROW | {"score": 1.01}]}), "item 1 has the score 1.01"),
    (json.dumps(WHOLE | {"items": [ROW | {"score": -1}]}), "item 1 has the score -1"),
    (json.dumps(WHOLE | {"items": [ROW | {"score": True}]}), "item 1 has the score True"),
)
def test_files_that_hold_no_run_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, words: str
) -> None:
    (tmp_path / "1").write_text(content)
    assert run(monkeypatch, str(tmp_path / "1"), write(tmp_path / "2", items(1))) == 2
    error = capsys.readouterr().err
    assert words in error
    assert str(tmp_path / "1") in error


def test_an_answer_may_hold_any_character_and_reading_gives_what_was_written(tmp_path: Path) -> None:
    item = Item(id="a", category="a", prompt="", answer="one\u2028two\x85\udcff"[:-1], score=0.5, details={"x": [1]})
    whole = Run(eval="e", settings={"a": 1}, server={}, items=[item], notes={"n": 1})
    whole.write(tmp_path / "run.json")
    assert Run.read(tmp_path / "run.json") == whole


@rows("arguments, words", (["--at-least", "98"], "--at-least is 98.0"), (["--alpha", "-1"], "--alpha is -1.0"))
def test_a_bar_out_of_range_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str],
    words: str,
) -> None:  # fmt: skip
    path = write(tmp_path / "1", items(1))
    assert run(monkeypatch, path, str(tmp_path / "nowhere")) == 2
    assert "nowhere" in capsys.readouterr().err
    assert run(monkeypatch, path, path, *arguments) == 2
    assert words in capsys.readouterr().err
