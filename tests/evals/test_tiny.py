"""`python -m evals tiny` against a small HTTP server that answers from the items themselves."""

import ast
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from evals import tiny
from evals.__main__ import main
from evals.results import Run
from tests.tables import rows

FOLDER = Path(tiny.__file__).parent
ANSWERS = {
    json.dumps(item["messages"]): item["check"]
    for category in ("addition", "tools")
    for item in tiny.load([category], None)[category]
}


class Oracle(BaseHTTPRequestHandler):
    """Knows every answer, but gets each sum wrong whose answer is odd."""

    def log_message(self, format: str, *args: object) -> None:
        """Keeps the test output clean."""

    def reply(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "oracle"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        check = ANSWERS[json.dumps(request["messages"])]
        message: dict = {"content": None}
        if check["kind"] == "call":
            function = {"name": check["name"], "arguments": json.dumps(check["arguments"])}
            message["tool_calls"] = [{"function": function}]
        else:
            message["content"] = str(check["value"] + check["value"] % 2)
        self.reply({"choices": [{"message": message}], "usage": {"completion_tokens": 5}})


@pytest.fixture
def base_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Oracle)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["evals", "tiny", *arguments])
    return main()


def test_table_json_and_exit_status(
    base_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--base-url", base_url, "--limit", "40", "--category", "tools"]
    assert run(monkeypatch, *flags) == 0
    assert run(monkeypatch, *flags, "--category", "addition") == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    even = sum(item["check"]["value"] % 2 == 0 for item in tiny.load(["addition"], 40)["addition"])
    assert last["categories"]["tools"]["percent"] == 100.0
    assert last["categories"]["addition"]["right"] == even < 40
    assert last["model"] == "oracle"
    assert last["passed"] is False


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--base-url", "http://127.0.0.1:9/v1") == 2
    assert "cannot be reached" in capsys.readouterr().err


def test_an_unknown_category_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--model", "m", "--category", "poetry") == 2
    assert "poetry" in capsys.readouterr().err


@rows("answers", "/dev/null/folder/file", "/")
def test_answers_that_cannot_be_written_are_refused_before_the_first_question(
    answers: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--base-url", "http://127.0.0.1:9/v1", "--answers", answers) == 2
    assert f"--answers {answers}" in capsys.readouterr().err


@rows("limit", "0", "-1")
def test_a_limit_below_one_is_refused(
    limit: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--model", "m", "--limit", limit) == 2
    assert f"--limit is {limit}" in capsys.readouterr().err


def test_a_limit_spreads_over_all_items() -> None:
    keys = [item["key"] for item in tiny.load(["facts"], 100)["facts"]]
    assert len(keys) == 100
    assert len({key.split(":")[0] for key in keys}) >= 8


def test_a_number_of_items_is_exact_spread_over_all_categories_and_the_same_every_time() -> None:
    everything = tiny.load([], None)
    chosen = tiny.spread(everything, 2000)
    assert sum(map(len, chosen.values())) == 2000
    assert chosen.keys() == everything.keys()
    whole = sum(map(len, everything.values()))
    for name, items in chosen.items():
        assert abs(len(items) - 2000 * len(everything[name]) / whole) < 1
        assert len({item["key"] for item in items}) == len(items)
    assert chosen == tiny.spread(tiny.load([], None), 2000)
    assert tiny.spread(everything, whole) == everything


@rows("count", 0, 10_000)
def test_more_items_than_there_are_is_an_error(count: int) -> None:
    with pytest.raises(ValueError, match=f"--items is {count}"):
        tiny.spread(tiny.load([], None), count)


def test_every_answer_is_written(base_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = ["--base-url", base_url, "--items", "30", "--category", "tools", "--category", "addition"]
    run(monkeypatch, *flags, "--answers", str(tmp_path / "answers.json"))
    items = Run.read(tmp_path / "answers.json").items
    asked = tiny.spread(tiny.load(["tools", "addition"], None), 30)
    assert [item.id for item in items] == [item["key"] for items in asked.values() for item in items]
    checks = {item["key"]: item["check"] for items in asked.values() for item in items}
    for item in items:
        check = checks[item.id]
        if item.category == "tools":
            assert item.answer == f"\n{check['name']} {json.dumps(check['arguments'])}"
            assert item.score == 1
        else:
            assert item.answer == str(check["value"] + check["value"] % 2)
            assert item.score == (check["value"] % 2 == 0)


def test_evals_import_nothing_of_ours() -> None:
    ours = {"server", "engine", "model", "loaders", "moe", "tools", "torch", "transformers"}
    for path in FOLDER.glob("**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not ours & {name.split(".")[0] for name in names}, path
