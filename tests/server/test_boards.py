"""What Grafana boards ask for: every query of `deploy/grafana.json`, and vLLM's names, are in a real scrape."""

import json
import re
from pathlib import Path

import httpx2
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.types import EngineOutput
from server import vllm_names
from tests.server.conftest import ANSWER, MODEL, FakeEngine, serve, wait_until

BOARD = json.loads((Path(__file__).resolve().parents[2] / "deploy" / "grafana.json").read_text())
VARIABLES = {"$model", "$__rate_interval", "$__range"}
FUNCTIONS = {"histogram_quantile", "sum", "max", "rate", "increase", "by", "le"}
SELECTOR = re.compile(r"(moe_serve_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"')

VLLM = [
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
    "request_success_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket", "request_time_per_output_token_seconds_bucket",
    "request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket", "request_inference_time_seconds_bucket",
    "request_prompt_tokens_bucket", "request_generation_tokens_bucket", "request_params_max_tokens_bucket",
    "iteration_tokens_total_bucket", "admission_rejections_total", "corrupted_requests_total",
]  # fmt: skip


def samples_of(text):
    """Labels and values of every sample, by its name."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


@pytest.fixture(scope="module")
def scrape(bundled_url):
    """The real service after some traffic."""
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8}
    with httpx2.Client(base_url=bundled_url, timeout=60) as http:
        for fields in ({}, {"stream": True}, {"n": 2}):
            assert http.post("/v1/chat/completions", json=body | fields).status_code == 200
        wait_until(lambda: "moe_serve_expert_tokens_total" in http.get("/metrics").text)  # sent once it is idle
        return samples_of(http.get("/metrics").text)


def queries():
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in BOARD["panels"]
        for target in panel.get("targets", [])
    ]


def missing_from(scrape, query):
    """What a query names that the scrape lacks: metrics, labels of its selectors, labels that it groups by."""
    missing, labels = [], set()
    for name, matchers in SELECTOR.findall(query):
        series = scrape.get(name, [])
        its_labels = {label for each, _ in series for label in each}
        labels |= its_labels
        missing += [] if series else [name]
        missing += sorted(set(MATCHER.findall(matchers)) - its_labels)
    for grouping in re.findall(r"by \(([^)]*)\)", query):
        missing += [label for label in grouping.split(", ") if label not in labels]
    return missing


def test_every_query_of_the_board_finds_data(scrape):
    assert len(queries()) > 30
    for title, query, legend in queries():
        assert SELECTOR.search(query), title
        assert missing_from(scrape, query) == [], (title, query)
        assert set(re.findall(r"\$\w+", query)) <= VARIABLES
        rest = SELECTOR.sub("", re.sub(r"by \([^)]*\)|\$\w+", "", query))
        assert set(re.findall(r"[a-z_]+", rest)) <= FUNCTIONS, (title, rest)
        grouped = {label for each in re.findall(r"by \(([^)]*)\)", query) for label in each.split(", ")}
        assert set(re.findall(r"{{(\w+)}}", legend)) <= grouped, (title, legend)


def test_the_boards_variable_lists_models(scrape):
    [variable] = [each for each in BOARD["templating"]["list"] if each["name"] == "model"]
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()
    assert {labels[label] for labels, _ in scrape[name]} == {"tiny-gpt-oss"}


def test_a_query_that_finds_nothing_is_noticed(scrape):
    for query, missing in (
        ("rate(moe_serve_no_such_total[1m])", ["moe_serve_no_such_total"]),
        ('rate(moe_serve_queue_seconds_bucket{mode="x"}[1m])', ["mode"]),
        ("sum by (layer) (moe_serve_engine_running)", ["layer"]),
    ):
        assert missing_from(scrape, query) == missing


def test_panels_do_not_overlap_and_have_ids_of_their_own():
    places = [each["gridPos"] for each in BOARD["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len({each["id"] for each in BOARD["panels"]}) == len(BOARD["panels"])


def test_times_of_a_real_engine_are_counted(scrape):
    counts = {name: sum(value for _, value in scrape[f"moe_serve_{name}_count"]) for name in (
        "time_to_first_token_seconds", "queue_seconds", "prefill_seconds", "inter_token_seconds",
    )}  # fmt: skip
    assert counts["queue_seconds"] == counts["prefill_seconds"] > counts["time_to_first_token_seconds"] >= 3
    assert counts["inter_token_seconds"] > 0


@pytest.fixture
def engine(harmony):
    def last(request, _num_tokens):
        return {"queue_s": 0.5, "prefill_s": 0.25}

    return FakeEngine(script=lambda _request: harmony(ANSWER), last=last)


def ask_and_scrape(engine, tokenizer, **settings):
    with serve(engine, tokenizer, **settings) as service, service.http() as http:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        for _ in range(2):
            assert http.post("/v1/chat/completions", json=body).status_code == 200
        return samples_of(http.get("/metrics").text)


def test_vllms_names_show_our_numbers(engine, tokenizer):
    found = ask_and_scrape(engine, tokenizer, metrics_names="vllm")
    assert {name.removeprefix("vllm:").removesuffix("_total") for name in found if name.startswith("vllm:")} >= {
        name.removesuffix("_total") for name in VLLM
    }
    for name in VLLM:
        for labels, _ in found[f"vllm:{name}"]:
            assert labels.items() >= {"model_name": MODEL, "engine": "0"}.items(), name
    assert [(labels["finished_reason"], value) for labels, value in found["vllm:request_success_total"]] == [
        ("stop", 2)
    ]
    for theirs, ours in vllm_names.OURS.items():
        for suffix in ("", "_total", "_sum", "_count"):
            values = [value for _, value in found.get(ours + suffix, [])]
            assert [value for _, value in found.get(f"vllm:{theirs}{suffix}", [])] == values, theirs
    assert found["vllm:request_queue_time_seconds_sum"][0][1] == 1.0
    assert found["vllm:kv_cache_usage_perc"][0][1] == 0.0


def test_vllms_names_are_shown_only_if_asked_for(engine, tokenizer):
    found = ask_and_scrape(engine, tokenizer)
    assert not [name for name in found if name.startswith("vllm:")]
    assert found["moe_serve_request_seconds_count"][0][1] == 2


def test_numbers_of_the_engine_under_vllms_names(tokenizer):
    class Half(FakeEngine):
        @property
        def stats(self):
            return msgspec.structs.replace(
                super().stats, num_pages_used=30, num_pages_total=60, num_not_finite=2, num_step_tokens=11,
                step_sizes=[1, 2] + [0] * 12,
            )  # fmt: skip

    with serve(Half(), tokenizer, metrics_names="vllm") as service, service.http() as http:
        found = samples_of(http.get("/metrics").text)
    labels = {"model_name": MODEL, "engine": "0"}
    assert found["vllm:kv_cache_usage_perc"] == [(labels, 0.5)]
    assert found["vllm:corrupted_requests_total"] == [(labels, 2)]
    buckets = [(each["le"], value) for each, value in found["vllm:iteration_tokens_total_bucket"]]
    assert buckets[:3] + buckets[-1:] == [("1.0", 1), ("8.0", 3), ("16.0", 3), ("+Inf", 3)]
    assert found["vllm:iteration_tokens_total_sum"] == [(labels, 11)]
    assert found["vllm:cache_config_info"] == [({"engine": "0", "block_size": "16", "num_gpu_blocks": "100"}, 1)]


def test_refusals_are_counted_by_what_had_run_out(engine, tokenizer):
    def refusing(_request, _num_tokens):
        return {"finish_reason": "error", "error": "full", "overloaded": True}

    keys = {"api_key": "k", "max_requests_per_key": 1, "metrics_names": "vllm"}
    for settings, last, statuses, what in (
        ({"metrics_names": "vllm"}, refusing, [429, 429], "queue"),
        (keys | {"tokens_per_minute_per_key": 1}, engine.last, [200, 429], "key"),
    ):
        refuser = FakeEngine(script=engine.script if what == "key" else lambda _request: [5], last=last)
        with serve(refuser, tokenizer, **settings) as service, service.http() as http:
            http.headers["authorization"] = "Bearer k"
            for status in statuses:
                body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
                assert http.post("/v1/chat/completions", json=body).status_code == status
            found = samples_of(http.get("/metrics").text)
        counts = {labels["what"]: value for labels, value in found["moe_serve_refused_total"]}
        assert counts == {"queue": 0, "bodies": 0, "key": 0} | {what: statuses.count(429)}
        [(labels, value)] = found["vllm:admission_rejections_total"]
        assert (labels["reason"], value) == ("max_num_queued_reqs", counts["queue"])


def test_outputs_without_times_are_as_small_as_before():
    assert b"queue_s" not in msgspec.json.encode(EngineOutput(request_id="a", token_ids=[1]))
