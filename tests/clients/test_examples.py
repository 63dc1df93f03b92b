"""The examples of docs/clients.md: the page shows each file as it is, and each runs against the real service."""

import json
import re

import pytest

from tests.clients.conftest import EXAMPLES, MODEL_FOLDER, ROOT, client_program
from tests.server.service_process import start_bundled

PARIS_IS = "The capital of France is Paris."
RESULT = "The result is 18."
CALLED = {"city": "Paris"}


@pytest.fixture
def ask(run, url):
    """Run an example in Python; returns the JSON object that it prints last."""

    def run_example(name, environment="current"):
        printed = run(client_program("python", environment), EXAMPLES / name, url, timeout_s=110)
        return json.loads(printed.splitlines()[-1])

    return run_example


def check_capital(answer):
    """Whatever the tiny model believes, the form of the answer is bound."""
    assert answer.keys() == {"city", "is_capital"}
    assert answer["city"] in ("Paris", "Rome")
    assert isinstance(answer["is_capital"], bool)


def test_the_page_shows_the_examples_as_they_are():
    page = (ROOT / "docs" / "clients.md").read_text()
    shown = dict(re.findall(r"^`examples/(\S+)`\n\n```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert shown == {path.name: path.read_text() for path in EXAMPLES.iterdir() if path.is_file()}


@pytest.mark.clients
def test_openai(ask):
    told = ask("ask_openai.py")
    assert told["answer"] == told["streamed"] == PARIS_IS
    assert told["called"] == CALLED
    check_capital(told["parsed"])


@pytest.mark.clients
def test_openai_responses(ask):
    told = ask("ask_openai_responses.py")
    assert told["answer"] == told["streamed"] == PARIS_IS
    assert (told["called"], told["after"]) == (CALLED, RESULT)
    check_capital(told["parsed"])


@pytest.mark.clients
def test_an_agent_over_chat(ask):
    assert ask("agent_openai.py") == [RESULT, "The result is 68.", "The capital of Italy is Rome."]


@pytest.mark.clients
def test_an_agent_over_responses(run, tmp_path):
    with start_bundled(tmp_path, "--response-store", str(tmp_path / "answers")) as service:
        printed = run(client_program("python"), EXAMPLES / "agent_openai_responses.py", service.url, timeout_s=110)
    assert json.loads(printed) == [RESULT, "The capital of Italy is Rome."]


@pytest.mark.clients
def test_anthropic(ask):
    told = ask("ask_anthropic.py")
    assert told["answer"] == told["streamed"] == PARIS_IS
    assert (told["called"], told["after"]) == (CALLED, RESULT)
    check_capital(told["parsed"])


@pytest.mark.clients
def test_litellm(ask):
    """G21: on the second turn litellm replays keys of its own inside the message."""
    for told in ask("ask_litellm.py").values():
        assert told["answer"] == told["streamed"] == PARIS_IS
        assert told["reasoning"]
        whole, streamed = told["tokens"]
        assert whole == streamed > 0
        assert (told["called"], told["after"]) == (CALLED, RESULT)
        check_capital(told["parsed"])


@pytest.mark.clients
def test_langchain(ask):
    told = ask("ask_langchain.py")
    assert told["answer"] == told["streamed"] == PARIS_IS
    whole, streamed = told["tokens"]
    assert whole == streamed > 0
    assert (told["called"], told["after"]) == (CALLED, RESULT)
    assert told["forced"] == ["get_weather"]
    check_capital(told["json_schema"])
    check_capital(told["function_calling"])
    assert isinstance(told["json_mode"], dict)
    assert told["completion"].startswith(" Paris")


@pytest.mark.clients
def test_openai_agents(ask):
    told = ask("ask_openai_agents.py")
    assert told["used_tool"] == RESULT
    check_capital(told["structured"])
    name, answer = told["handed_off"]
    assert name == "geographer"
    check_capital(answer)


@pytest.mark.clients
def test_pydantic_ai(ask):
    told = ask("ask_pydantic_ai.py")
    assert told.keys() == {"chat", "responses"}
    for answers in told.values():
        assert "18" in answers["used_tool"]
        check_capital(answers["tool_output"])
        check_capital(answers["native_output"])


@pytest.mark.clients
def test_instructor(ask):
    told = ask("ask_instructor.py", "openai2")
    check_capital(told["TOOLS"])
    check_capital(told["JSON_SCHEMA"])
    assert told["JSON"].keys() == {"city"}


@pytest.mark.clients
def test_llama_index(ask):
    told = ask("ask_llama_index.py", "openai2")
    assert told["answer"] == told["streamed"] == PARIS_IS
    assert told["used_tool"] == "{'result': 18}"  # what the function returned
    check_capital(told["structured"])


@pytest.mark.clients
@pytest.mark.timeout(300)
def test_lm_eval(run, url, tmp_path):
    tasks = EXAMPLES.parent / "lm_eval_tasks"
    run(EXAMPLES / "lm_eval.sh", url, "--tasks", "capitals_choice", "--include_path", tasks, "--output_path", tmp_path)
    [results] = tmp_path.glob("**/results_*.json")
    assert json.loads(results.read_text())["results"]["capitals_choice"]["acc,none"] == 1.0


@pytest.mark.clients
@pytest.mark.timeout(300)
def test_guidellm(run, url, tmp_path):
    report = tmp_path / "report.json"
    output = ("--output", f"kind=json,path={report}", "--disable-console")
    run(EXAMPLES / "guidellm.sh", url, MODEL_FOLDER, "--constraint", "kind=max_requests,count=8", *output)
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (8, 0)
