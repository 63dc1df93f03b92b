"""lm-eval against the real service: scored choices, generated text, chat; offline, with tasks of this folder."""

import json

import pytest

from tests.clients.conftest import HERE, MODEL_FOLDER, client_program

pytestmark = pytest.mark.clients


@pytest.fixture
def evaluate(run, url, tmp_path):
    """Run tasks; returns the accuracy of each, or its share of exact matches."""

    def accuracies(model, route, tasks, *options, **arguments):
        given = {"base_url": url + route, "model": "tiny-gpt-oss", **arguments}
        run(
            client_program("lm_eval"),
            *("--model", model, "--model_args", ",".join(f"{key}={value}" for key, value in given.items())),
            *("--tasks", ",".join(tasks), "--include_path", HERE / "lm_eval_tasks"),
            *("--output_path", tmp_path, *options),
        )
        [results] = tmp_path.glob("**/results_*.json")
        found = json.loads(results.read_text())["results"]
        return {
            task: next(found[task][name] for name in found[task] if name.startswith(("acc,", "exact")))
            for task in tasks
        }

    return accuracies


TASKS = ["capitals_choice", "capitals_text"]


def test_completions_with_the_files_of_the_tokenizer(evaluate):
    """Prompts are token ids, scores come by `echo` with `logprobs`, and the right city has the best."""
    found = evaluate(
        "local-completions", "/v1/completions", TASKS, tokenizer=MODEL_FOLDER, tokenizer_backend="huggingface"
    )
    assert found == dict.fromkeys(TASKS, 1.0)


def test_completions_with_the_tokenizer_of_the_service(evaluate):
    """Without a tokenizer it asks for /tokenizer_info and tokenizes there."""
    found = evaluate("local-completions", "/v1/completions", TASKS, "--batch_size", "4")
    assert found == dict.fromkeys(TASKS, 1.0)


def test_chat(evaluate):
    found = evaluate(
        "local-chat-completions", "/v1/chat/completions", ["capitals_chat"], "--apply_chat_template", num_concurrent=3
    )
    assert found == {"capitals_chat": 1.0}
