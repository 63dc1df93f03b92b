"""For operators: health (B46), the key check on every route (B47), metrics with bounded labels, draining."""

import json
import signal
import threading
import time
from contextlib import ExitStack, suppress

import openai
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route

from server.routes.page import page_routes
from tests.server.conftest import ANSWER, MODEL, FakeEngine, one_process_only, serve, wait_until
from tests.tables import rows

USER = [{"role": "user", "content": "Hi"}]
KEY = "secret-key"


def status_of(service, path):
    with service.http() as http:
        response = http.get(path)
    return response.status_code, response.json()


def test_ready_alive_and_busy_b46(service):
    status, body = status_of(service, "/health/ready")
    assert (status, body["status"], body["models"]) == (200, "ready", [MODEL])
    assert body["engine"]["moe_paths"] == ["layer 0: torch / none / mxfp4"]
    assert body["engine"]["selfcheck"] == [
        {"layer": 0, "path": "torch/none/mxfp4", "worst_error": 2e-6, "tolerance": 1e-5}
    ]
    assert body["load_error"] is None
    assert body["stats"]["num_running"] == 0
    assert status_of(service, "/health/live")[0] == 200
    service.engine.heartbeat_age_s = 59.0
    assert status_of(service, "/health/live")[0] == 200


def test_while_loading(service):
    service.engine.ready = False
    service.engine.heartbeat_age_s = 1000.0
    status, body = status_of(service, "/health/ready")
    assert (status, body["reason"]) == (503, "the model is still loading")
    assert status_of(service, "/health/live")[0] == 200
    with service.http() as http:
        response = http.post("/v1/chat/completions", json={"messages": USER})
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert response.json()["error"]["code"] == "unavailable"


@rows("state", {"alive": False}, {"failure": "out of memory at 0x77"}, {"heartbeat_age_s": 61.0})
def test_dead_or_hung_engine_b46(service, state):
    service.engine.__dict__.update(state)
    assert status_of(service, "/health/ready")[0] == 503
    status, body = status_of(service, "/health/live")
    assert (status, body["status"]) == (503, "dead")
    assert "0x77" not in json.dumps(body)


def test_a_failed_self_check_is_named_where_the_operator_looks(service):
    text = "layer 3, triton/none/mxfp4: expert 7 differs from the reference by 0.4 in outputs 0..127"
    service.engine.ready, service.engine.failure = False, text
    status, body = status_of(service, "/health/ready")
    assert (status, body["reason"], body["load_error"]) == (503, "the engine has stopped", text)
    with service.http() as http:
        assert "expert 7" not in http.post("/v1/chat/completions", json={"messages": USER}).text


def test_the_self_check_is_a_metric(service):
    with service.http() as http:
        text = http.get("/metrics").text
        assert 'moe_serve_selfcheck_error{layer="0",path="torch/none/mxfp4"} 2e-06' in text
        assert 'moe_serve_selfcheck_tolerance{layer="0",path="torch/none/mxfp4"} 1e-05' in text
        service.engine.ready = False  # loading: nothing has been checked
        assert "moe_serve_selfcheck_error{" not in http.get("/metrics").text


def test_version(service):
    assert set(status_of(service, "/version")[1]) == {"version"}


def all_routes(app):
    """Path and method of every route of the app's table, the framework's own included, parameters filled in."""
    return [
        (route.path.replace("{name:path}", MODEL), method)
        for route in flat(app.routes)
        for method in sorted(route.methods | ({"HEAD"} if "GET" in route.methods else set()))
    ]


def flat(routes):
    for route in routes:
        if isinstance(route, Route | APIRoute):
            yield route
        else:  # a router that was included
            yield from flat(route.original_router.routes)


@pytest.fixture(scope="module")
def guarded(tokenizer):
    with serve(FakeEngine(), tokenizer, api_key=KEY) as service:
        yield service


def test_every_route_needs_the_key_b47(guarded):
    """The table itself is walked: a route that is opened by mistake is found, whoever registered it."""
    open_paths = {"/health", "/health/live", "/health/ready"} | {route.path for route in page_routes()}
    routes = all_routes(guarded.app)
    assert {path for path, _ in routes} >= open_paths | {"/openapi.json", "/metrics", "/v1/models", "/v1/completions"}
    with guarded.http() as http:
        for path, method in [*routes, ("/nothing", "GET"), ("/v1/models", "OPTIONS")]:
            for spelled in (path, path + "/", "/" + path, path.upper(), path.replace("/", "/%2e/", 1)):
                status = http.request(method, guarded.url + spelled).status_code
                assert (status == 200) if spelled in open_paths else (status in (401, 404)), (method, spelled)
            if path not in open_paths:
                assert http.request(method, path).status_code == 401
                assert http.request(method, path, headers={"authorization": f"Bearer {KEY}"}).status_code != 401


def test_health_is_an_alias_of_readiness_g05(service):
    assert status_of(service, "/health") == status_of(service, "/health/ready")
    service.engine.ready = False
    status, body = status_of(service, "/health")
    assert (status, body["reason"]) == (503, "the model is still loading")


def test_head_is_get_without_a_body_g05(service):
    with service.http() as http:
        for path, method in all_routes(service.app):
            if method == "GET":
                get, head = http.get(path), http.head(path)
                status = 404 if path == "/v1/responses/{response_id}" else 200  # no answers are stored
                assert (head.status_code, head.content) == (get.status_code, b"") == (status, b""), path
                assert head.headers["content-type"] == get.headers["content-type"]
        for path, status in (("/v1/completions", 405), ("/nothing", 404), ("/v1/models/nothing", 404)):
            head = http.head(path)
            assert (head.status_code, head.content) == (status, b"")
        assert 'moe_serve_http_responses_total{route="/health/live",status="200"}' in http.get("/metrics").text
        service.engine.alive = False
        assert http.head("/health").status_code == http.head("/health/live").status_code == 503


@rows("header", f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY}")
def test_right_key(guarded, header):
    with guarded.http() as http:
        assert http.get("/v1/models", headers={"authorization": header}).status_code == 200


@rows("header", "", KEY, f"Basic {KEY}", "Bearer", "Bearer wrong", f"Bearer {KEY}x", "Bearer ü")
def test_wrong_key(guarded, header):
    with guarded.http() as http:
        response = http.get("/v1/models", headers={"authorization": header.encode()})
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_official_client_with_a_key(guarded):
    with guarded.client(api_key=KEY) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
    with guarded.client(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def series_of(http):
    return [line.rpartition(" ")[0] for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]


def test_labels_come_from_served_names_alone_b47(service, harmony):
    service.engine.script = lambda _request: harmony(ANSWER)
    with service.http() as http:

        def ask(model, path="/v1/chat/completions"):
            return http.post(path, json={"model": model, "messages": USER})

        ask(MODEL), ask("junk"), ask("x", "/junk"), http.get("/metrics")
        before = series_of(http)
        for number in range(100):
            assert ask(f"junk-{number}").status_code == 404
            assert ask("x", f"/junk-{number}").status_code == 404
        assert series_of(http) == before


def test_metrics_count(service, harmony):
    service.engine.script = lambda _request: harmony(ANSWER)

    def value(http, series):
        lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(series + " ")]
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0

    with service.http() as http:
        series = f'moe_serve_completion_tokens_total{{model="{MODEL}"}}'
        before = value(http, series)
        http.post("/v1/chat/completions", json={"messages": USER})
        assert value(http, series) == before + len(harmony(ANSWER))
        assert value(http, f'moe_serve_choices_finished_total{{model="{MODEL}",reason="stop"}}') >= 1
        assert value(http, 'moe_serve_http_responses_total{route="/v1/chat/completions",status="200"}') >= 1
        assert value(http, "moe_serve_engine_pages") == 0
        assert value(http, "moe_serve_engine_kv_tokens") == 1600


@pytest.fixture
def start(tokenizer):
    """Starts servers that can be told to stop."""
    with ExitStack() as stack:

        def start(engine, **settings):
            server = serve(engine, tokenizer, **settings)
            return stack.enter_context(server), server

        yield start


def stream_in_background(service, received):
    """A client that notes what it receives; returns once the first chunk is there."""

    def run():
        fields = {"model": MODEL, "prompt": "a", "max_tokens": 30, "stream": True}
        with service.client() as client, client.completions.create(**fields) as stream, suppress(openai.APIError):
            received.extend(chunk.choices[0].finish_reason for chunk in stream)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: bool(received))
    return thread


@one_process_only
def test_running_work_finishes_while_new_work_is_refused(start):
    service, thread = start(FakeEngine(delay_s=0.05, script=lambda _request: [[5]] * 30))
    received = []
    client = stream_in_background(service, received)
    service.server.handle_exit(signal.SIGTERM, None)
    status, body = status_of(service, "/health/ready")
    assert (status, body["reason"]) == (503, "the service is shutting down")
    assert status_of(service, "/health/live")[0] == 200
    with service.http() as http:
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
    client.join(10)
    assert received[-1] == "stop"
    thread.join(10)
    assert not thread.is_alive()
    assert service.engine.aborted == []


@one_process_only
def test_work_that_takes_too_long_is_ended_with_an_error(start):
    """Streams ended without a word, other requests with a plain text 500."""
    service, thread = start(FakeEngine(delay_s=0.2, script=lambda _request: [[5]] * 30), drain_timeout=0.1)
    answers = {}

    def ask(stream):
        with service.http() as http:
            answers[stream] = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 30, "stream": stream})

    clients = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    for client in clients:
        client.start()
    wait_until(lambda: len(service.engine.running) == 2)
    time.sleep(0.3)  # the stream has begun
    service.server.handle_exit(signal.SIGTERM, None)
    for ended in (thread, *clients):
        ended.join(10)
    assert not thread.is_alive()
    assert answers[False].status_code == 503
    assert answers[False].json()["error"]["code"] == "unavailable"
    events = answers[True].text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert json.loads(events[0].removeprefix("data: "))["choices"]
    assert len(service.engine.aborted) == 2


@one_process_only
@rows("age_s, hangs", (4.0, False), (6.0, True))
def test_an_engine_that_hangs_is_not_waited_for_g85(start, age_s, hangs):
    service, thread = start(FakeEngine(delay_s=0.05, script=lambda _request: [[5]] * 30))
    client = stream_in_background(service, received := [])
    service.engine.heartbeat_age_s = age_s
    service.server.handle_exit(signal.SIGTERM, None)
    for ended in (client, thread):
        ended.join(10)
    assert service.server.engine_hangs == hangs
    assert (received[-1] == "stop") != hangs
    assert bool(service.engine.aborted) == hangs


@one_process_only
@rows("exits", True, False)
def test_the_server_ends_with_its_engine_only_if_so_set_g82(start, exits):
    service, thread = start(FakeEngine(), exit_on_engine_death=exits)
    service.engine.failure = "gone"
    wait_until(lambda: service.server.should_exit == exits)
    thread.join(10 if exits else 0.3)
    assert thread.is_alive() != exits


@one_process_only
def test_idle_server_stops_at_once(start):
    service, thread = start(FakeEngine())
    service.server.handle_exit(signal.SIGTERM, None)
    thread.join(10)
    assert not thread.is_alive()
