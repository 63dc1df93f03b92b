"""OpenTelemetry spans of answers, as a collector gets them: phases, parents, attributes, and never any text."""

import os
import signal
import socket
import sys
import time

import pytest

from server import cli
from server.config import ServerConfig
from server.errors import SettingError
from tests.server.conftest import ANSWER, MODEL, FakeEngine, serve, wait_until
from tests.server.otlp_collector import collecting
from tests.server.service_process import start
from tests.tables import rows

SECRET = "the launch code is 0000"
BODY = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 40, "temperature": 0.5, "seed": 7}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PHASES = ["prepare", "queue", "prefill", "decode", "detokenize"]
QUEUE_S, PREFILL_S = 0.5, 0.25


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Spans are sent every 20 ms instead of every 5 s."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture
def collector():
    with collecting() as collector:
        yield collector


@pytest.fixture
def engine(harmony):
    def last(_request, _num_tokens):
        return {"queue_s": QUEUE_S, "prefill_s": PREFILL_S, "num_cached_tokens": 3}

    return FakeEngine(script=lambda _request: harmony(ANSWER), last=last)


@rows("stream", False, True)
def test_an_answer_has_a_span_with_its_phases_below_the_callers(engine, tokenizer, stream, collector):
    collector.forget()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine-1"}
    begun_ns = time.time_ns()
    with serve(engine, tokenizer, otlp_endpoint=collector.url) as service, service.http() as http:
        answer = http.post("/v1/chat/completions", json=BODY | {"stream": stream, "n": 2}, headers=headers)
        assert answer.status_code == 200
        [root] = collector.roots(1)
        wait_until(lambda: len(collector.children(root)) == len(PHASES))
    assert collector.paths == {"/v1/traces"}
    assert (root.trace_id, root.parent_id, root.kind, root.is_error) == (TRACE, PARENT, 2, False)  # 2: a server's
    children = collector.children(root)
    assert list(children) == PHASES
    assert {each.trace_id for each in children.values()} == {TRACE}
    assert begun_ns <= root.start_ns <= children["prepare"].start_ns
    assert root.end_ns >= max(each.end_ns for each in (children["decode"], children["detokenize"]))
    seconds = {name: (each.end_ns - each.start_ns) / 1e9 for name, each in children.items()}
    assert seconds["queue"] == pytest.approx(QUEUE_S, abs=1e-5)
    assert seconds["prefill"] == pytest.approx(PREFILL_S, abs=1e-5)
    assert 0 < children["detokenize"].attributes["moe_serve.busy_seconds"] < (root.end_ns - root.start_ns) / 1e9
    assert children["queue"].start_ns == children["prepare"].end_ns
    attributes = root.attributes
    assert attributes.items() >= {
        "gen_ai.operation.name": "chat", "gen_ai.request.id": "mine-1", "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 40, "gen_ai.request.temperature": 0.5, "gen_ai.request.seed": 7,
        "gen_ai.request.choice.count": 2, "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.latency.time_in_queue": QUEUE_S, "gen_ai.latency.time_in_model_prefill": PREFILL_S,
        "http.route": "/v1/chat/completions", "http.response.status_code": 200,
    }.items()  # fmt: skip
    assert attributes["gen_ai.response.finish_reasons"] == ["stop", "stop"]
    assert attributes["gen_ai.response.id"] in answer.text
    if not stream:
        usage = answer.json()["usage"]
        assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert root.resource.items() >= {"service.name": "moe-serve", "process.pid": os.getpid()}.items()
    assert "error.type" not in attributes
    for text in ("launch", "Paris"):
        assert text not in repr(collector.spans)


@rows(
    "path, body, operation",
    ("/v1/completions", {"prompt": "Hi"}, "text_completion"),
    ("/v1/responses", {"input": "Hi"}, "chat"),
    ("/v1/messages", {"model": MODEL, "max_tokens": 40, "messages": [{"role": "user", "content": "Hi"}]}, "chat"),
)
def test_every_endpoint_that_answers_is_traced_and_no_other(engine, tokenizer, path, body, operation, collector):
    collector.forget()
    with serve(engine, tokenizer, otlp_endpoint=f"{collector.url}/own/path") as service, service.http() as http:
        for other in ("/health", "/metrics", "/v1/models"):
            assert http.get(other).status_code == 200
        assert http.post("/tokenize", json={"prompt": "Hi"}).status_code == 200
        assert http.post(path, json=body).status_code == 200
        [root] = collector.roots(1)
    assert (root.attributes["http.route"], root.attributes["gen_ai.operation.name"]) == (path, operation)
    assert root.parent_id == ""
    assert collector.paths == {"/own/path"}


def failing(request, _num_tokens):
    return {"finish_reason": "error", "error": "the step failed"}


@rows(
    "fields, last, error, is_fault, phases",
    ({"temperature": -1}, None, "400", False, []),
    ({"model": "another"}, None, "404", False, []),
    ({}, failing, "500", True, PHASES),
    ({"stream": True}, failing, "500", True, PHASES),  # the status was 200 by then
)
def test_a_failure_is_told(harmony, tokenizer, fields, last, error, is_fault, phases, collector):
    collector.forget()
    engine = FakeEngine(script=lambda _request: harmony(ANSWER), last=last)
    with serve(engine, tokenizer, otlp_endpoint=collector.url) as service, service.http() as http:
        answer = http.post("/v1/chat/completions", json=BODY | fields)
        [root] = collector.roots(1)
        wait_until(lambda: len(collector.children(root)) == len(phases))
    assert root.attributes["error.type"] == error
    assert root.is_error == is_fault
    assert list(collector.children(root)) == phases
    assert root.attributes["http.response.status_code"] == answer.status_code


def test_a_caller_that_does_not_sample_gets_no_spans(engine, tokenizer, collector):
    with serve(engine, tokenizer, otlp_endpoint=collector.url) as service, service.http() as http:
        for flags in ("00", "01"):
            http.post("/v1/chat/completions", json=BODY, headers={"traceparent": f"00-{TRACE}-{PARENT}-{flags}"})
        http.post("/v1/chat/completions", json=BODY, headers={"traceparent": "00-nonsense"})
        roots = collector.roots(2)
    assert [each.trace_id == TRACE for each in roots] == [True, False]


@pytest.mark.processes
def test_each_http_process_sends_its_own_and_what_is_left_at_the_end(tmp_path, monkeypatch, collector):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "of-mine")
    argv = ("--otlp-endpoint", collector.url, "--api-workers", "2")
    with start(tmp_path, "slow", *argv) as service:
        with service.http() as first, service.http() as second:
            for http in (first, second, first, second):
                body = {"prompt": [5], "max_tokens": 3, "ignore_eos": True}
                assert http.post("/v1/completions", json=body).status_code == 200
            pids = set(service.api_pids)
        service.signal(signal.SIGTERM)
        assert service.process.wait(20) == 0
    roots = collector.roots(4)
    assert {each.resource["process.pid"] for each in roots} == pids
    assert {each.resource["service.name"] for each in roots} == {"of-mine"}


def test_a_collector_that_is_gone_holds_nothing_up(tmp_path):
    """The exporter tries again for a while: that must not be what the end of the service waits for."""
    silent = socket.create_server(("127.0.0.1", 0))  # takes connections and says nothing
    url = f"http://127.0.0.1:{silent.getsockname()[1]}"
    with silent, start(tmp_path, "slow", "--otlp-endpoint", url) as service:
        with service.http() as http:
            answer = http.post("/v1/completions", json={"prompt": [5], "max_tokens": 3, "ignore_eos": True})
            assert answer.status_code == 200
        service.signal(signal.SIGTERM)
        assert service.process.wait(15) == 0


def test_without_the_packages_the_flag_says_how_to_get_them(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "server.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert cli.main(["--otlp-endpoint", "http://localhost:4318", "--port", "0"]) == cli.USAGE_ERROR
    assert "opentelemetry.sdk.trace, which is not installed: pip install opentelemetry-sdk" in capsys.readouterr().err


@rows("url", "localhost:4318", "", "grpc://collector:4317", "http://")
def test_an_endpoint_that_is_no_url_is_refused(url):
    with pytest.raises(SettingError, match=r"otlp_endpoint is .* such as http://localhost:4318"):
        ServerConfig(otlp_endpoint=url)
