"""`python -m evals run`: lm-eval against the real service with tasks of the bundled data; the report, and refusals."""

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from evals.__main__ import main
from evals.report import write_report
from evals.results import Item, Run
from evals.run import PYTHON
from evals.tasks import TASKS
from tests.tables import rows

ROOT = Path(__file__).parents[2]
TASK_FILES = Path(__file__).parent / "lm_eval_tasks"
CLIENT_TASKS = ROOT / "tests" / "clients"


@pytest.fixture(scope="module")
def evaluate(bundled_url, tmp_path_factory):
    """Run evals from a folder; returns the status, what it said, and the runs by name."""

    def run(*arguments: str | Path, at: Path = ROOT) -> tuple[int, str, dict[str, Run]]:
        assert PYTHON.exists(), "run `make evals`, which makes lm-eval's environment"
        out, home = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("home")
        flags = ("--base-url", f"{bundled_url}/v1", "--out", out)
        environment = os.environ | {"HF_HOME": str(home), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "evals", "run", *arguments, *flags]
        done = subprocess.run(command, cwd=at, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr, {path.stem: Run.read(path) for path in out.glob("*.json")}

    return run


@pytest.mark.evals
@pytest.mark.timeout(600)
def test_a_chat_is_scored_by_its_final_channel(evaluate, tmp_path):
    status, said, runs = evaluate(
        "local_addition", "local_facts", "local_words", "--tasks-folder", TASK_FILES, "--limit", "20", "--offline"
    )
    assert status == 0, said
    assert runs["local_addition"].summary()["local_addition"]["percent"] == 100.0
    assert runs["local_facts"].summary()["local_facts"]["percent"] >= 80.0
    for run in runs.values():
        assert [len(run.items), run.notes["cut_off"], run.notes["empty"]] == [20, 0, 0]
        assert all(item.details["reasoning"] and item.details["reasoning"] not in item.answer for item in run.items)
        assert run.settings["lm_eval"] == "0.4.13"
    [own] = runs["local_words"].notes["lm_eval_results"].values()
    shares = [item.score for item in runs["local_words"].items]
    assert sum(shares) / 20 == pytest.approx(own["share,none"])
    assert "answers: 100%" in said, "progress is shown"


@pytest.mark.evals
@pytest.mark.timeout(600)
def test_completions_score_choices_with_data_of_a_folder(evaluate):
    tasks = CLIENT_TASKS / "lm_eval_tasks"
    status, said, runs = evaluate(
        "capitals_choice", "--form", "completions", "--tasks-folder", tasks, "--data", CLIENT_TASKS
    )
    assert status == 0, said
    assert [(item.id, item.score) for item in runs["capitals_choice"].items] == [
        (f"capitals_choice/{number}", 1.0) for number in range(3)
    ]
    status, said, runs = evaluate("capitals_choice", "--tasks-folder", tasks, "--data", CLIENT_TASKS)
    assert (status, runs) == (2, {})
    assert "capitals_choice scores log-likelihoods, which a chat does not give: use --form completions" in said


@pytest.mark.evals
@pytest.mark.timeout(600)
def test_the_same_run_twice_can_be_compared(evaluate, tmp_path, monkeypatch, capsys):
    paths = []
    for name in ("first", "second"):
        flags = ("--tasks-folder", TASK_FILES, "--limit", "10", "--offline")
        status, said, runs = evaluate("local_addition", *flags)
        assert status == 0, said
        runs["local_addition"].write(tmp_path / name)
        paths.append(str(tmp_path / name))
    monkeypatch.setattr(sys, "argv", ["evals", "compare", *paths, "--at-least", "1"])
    assert main() == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["same_answer"] == 10


@pytest.mark.evals
@pytest.mark.timeout(600)
def test_every_well_known_name_is_a_task_of_the_installed_lm_eval(tmp_path):
    wanted = sorted({name for task in TASKS.values() for name in (*task.chat, *task.completions)})
    code = (
        "import json, lm_eval.tasks, sys; names = lm_eval.tasks.TaskManager().all_tasks; json.dump(names, sys.stdout)"
    )
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    assert set(wanted) <= set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.evals
@pytest.mark.timeout(600)  # each indexes all tasks of lm-eval
def test_what_lm_eval_cannot_do_is_said(evaluate):
    for arguments, words in (
        (["gsm8k", "--offline"], "the data of gsm8k cannot be had: "),
        (["gsm8k", "--data", TASK_FILES], "openai/gsm8k"),
        (["ifeval", "--data", TASK_FILES], "needs NLTK's table punkt_tab"),
        (["gsm9k", "--offline"], "knows no task gsm9k"),
    ):
        status, said, _ = evaluate(*arguments, "--limit", "1")
        assert status == 2
        assert words in said
        assert "Traceback" not in said


TASK = """
task: own
dataset_path: json
dataset_kwargs: {data_files: {test: evals/data/sorting.jsonl}}
test_split: test
generation_kwargs: {until: ["\\n\\n"], do_sample: false}
doc_to_target: "{{check['items'] | join(' ')}}"
"""
QUESTION = "doc_to_text: \"{{messages[0]['content']}}\"\n"
ROLLING = "output_type: loglikelihood_rolling\ndoc_to_text: ''\nmetric_list: [{metric: word_perplexity}]\n"
BLEU = f"output_type: generate_until\n{QUESTION}metric_list: [{{metric: bleu}}]\n"
PER_CENT = (
    f"output_type: generate_until\n{QUESTION}process_results: !function cent.score\n"
    "metric_list: [{metric: cents, aggregation: mean, higher_is_better: true}]\n"
)
UNDEFINED = 'output_type: generate_until\ndoc_to_text: "{{nothing.there}}"\nmetric_list: [{metric: exact_match}]\n'


@pytest.mark.evals
@pytest.mark.timeout(600)
@rows(
    "lines, form, words",
    (ROLLING, "completions", "own has no score from 0 to 1 for each item, only word_perplexity of them all"),
    (BLEU, "chat", "only bleu of them all"),
    (PER_CENT, "chat", '"cents,none": 50.0'),
    (UNDEFINED, "chat", "lm-eval cannot run own: UndefinedError: 'nothing' is undefined"),
)
def test_a_task_whose_items_cannot_be_scored_is_named(evaluate, tmp_path, lines, form, words):
    """The whole run was lost in a traceback. What is known before is refused before the first request."""
    (tmp_path / "own.yaml").write_text(TASK + lines)
    (tmp_path / "cent.py").write_text("def score(doc, results):\n    return {'cents': 50.0}\n")
    status, said, runs = evaluate("own", "--tasks-folder", tmp_path, "--limit", "2", "--offline", "--form", form)
    assert (status, runs) == (2, {})
    assert words in said.splitlines()[-1]
    assert ("answers:" in said) == (lines is PER_CENT)


@rows(
    "arguments, words",
    (["gsm8k", "--limit", "0"], "--limit is 0"),
    (["gsm8k", "--max-tokens", "-1"], "--max-tokens is -1"),
    (["gsm8k", "--data", "nowhere"], "--data nowhere is not a folder"),
    (
        ["a", "--lm-eval-python", sys.executable, "--model", "m", "--out", "/dev/null/x"],
        "--out /dev/null/x/a.json: its",
    ),
    (["gsm8k", "--lm-eval-python", "nowhere"], "`scripts/lm_eval_environment` makes it"),
    (["gsm8k", "--lm-eval-python", sys.executable, "--concurrency", "0"], "--concurrency is 0"),
    (["gsm8k", "--lm-eval-python", sys.executable, "--base-url", "http://127.0.0.1:9/v1"], "cannot be reached"),
)
def test_flags_are_checked_before_lm_eval_starts(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(sys, "argv", ["evals", "run", *arguments])
    assert main() == 2
    assert words in capsys.readouterr().err


class Texts(HTMLParser):
    """All text of a page, and its elements by name."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.elements = "", []

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.elements.append((tag, dict(attrs).get("class")))


def test_the_report_shows_every_transcript_as_text(tmp_path):
    hostile = "<script>alert(1)</script> & </pre>"
    items = [
        Item(id=f"a/{i}", category="a", prompt=hostile, answer=f"answer {i}", score=score, details={"reasoning": "so"})
        for i, score in enumerate((1.0, 0.0, 0.5))
    ]
    write_report(Run(eval="a", settings={"seed": 0}, server={}, items=items, notes={"cut_off": 1}), tmp_path / "a.html")
    page = Texts()
    page.feed((tmp_path / "a.html").read_text())
    assert page.text.count(hostile) == 3
    assert [kind for tag, kind in page.elements if tag == "details"] == ["right", "wrong", "part"]
    assert "script" not in [tag for tag, _ in page.elements]
    assert '"cut_off": 1' in page.text
