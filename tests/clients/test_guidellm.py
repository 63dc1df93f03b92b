"""guidellm against the real service: a benchmark of a few requests, chat and completions."""

import json

import pytest

from tests.clients.conftest import MODEL_FOLDER, PARIS, client_program

pytestmark = pytest.mark.clients


@pytest.fixture
def benchmark(run, url, tmp_path):
    """Run one benchmark; returns guidellm's own report."""

    def measure(backend, *options):
        report = tmp_path / "report.json"
        run(
            client_program("guidellm"),
            "run",
            *("--backend", f"kind=openai_http,target={url}{backend}"),
            *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
            *("--tokenizer", f"kind=hf_auto,model={MODEL_FOLDER}"),
            *("--output", f"kind=json,path={report}", "--disable-console"),
            *options,
        )
        [benchmark] = json.loads(report.read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"]) == (6, 0)
        return benchmark["requests"]["successful"]

    return measure


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_synthetic_prompts(benchmark, route):
    """It asks /health first, sends continuous_usage_stats, and ignores the end token to get the length it wants."""
    synthetic = "kind=synthetic_text,prompt_tokens=32,output_tokens=16"
    for request in benchmark(f",request_format={route}", "--data", synthetic):
        assert request["output_tokens"] == 16
        assert request["prompt_tokens"] >= 30
        assert request["time_to_first_token_ms"] > 0


def test_given_prompts(benchmark, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(6 * (json.dumps({"prompt": PARIS}) + "\n"))
    for request in benchmark("", "--data", f"kind=json_file,path={prompts}"):
        assert request["output"] == "The capital of France is Paris."
