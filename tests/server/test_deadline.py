"""Deadlines: a request that gives its answer too little time ends with an error, and leaves the engine."""

import json
import threading
from contextlib import closing
from http.client import HTTPConnection

import openai
import pytest

from server.lanes import LARGE_BODY_BYTES
from tests.server.conftest import ANSWER, MODEL, one_process_only
from tests.tables import rows

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 40},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40},
}


@pytest.fixture
def ask(service, harmony):
    service.engine.script = lambda _request: harmony(ANSWER)
    with service.http() as http:

        def send(path, timeout_s=None, header=None, **fields):
            headers = {} if header is None else {"X-Request-Timeout": header}
            field = {} if timeout_s is None else {"timeout": timeout_s}
            return http.post(path, json={**BODIES[path], **field, **fields}, headers=headers)

        yield send
    assert not service.engine.running, "the engine still works on it"


@rows("path", *BODIES)
@rows("stream", False, True)
def test_no_answer_comes_later_than_its_deadline(path, stream, ask, service):
    service.engine.forget()
    service.engine.delay_s = 5.0  # to the first token, as in a long queue
    answer = ask(path, header="0.05", stream=stream)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false")
    error = answer.json()["error"]
    assert "0.05 s" in error["message"]
    assert error.get("code", error["type"]) in ("deadline_exceeded", "timeout_error")
    assert service.engine.aborted == [each.request_id for each in service.engine.requests]
    service.engine.delay_s = 0.0
    assert ask(path, header="20", stream=stream).status_code == 200


@rows(
    "field, header, status",
    (0.05, None, 504),
    (0.05, "20", 504),
    (20, "0.05", 504),
    (1e-9, None, 504),  # over before the engine is asked
    (20, "20", 200),
)
def test_the_shorter_time_counts(field, header, status, ask, service):
    service.engine.delay_s = 0.0 if status == 200 else 5.0
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        assert ask(path, field, header).status_code == status


def test_a_stream_that_has_begun_ends_with_the_error(ask, service):
    service.engine.script, service.engine.delay_s = lambda _request: [65] * 1000, 0.02
    text = ask("/v1/completions", 0.2, stream=True, max_tokens=1000).text
    *events, last = (line.removeprefix("data: ") for line in text.split("\n\n") if line)
    assert len(events) > 1
    assert json.loads(last)["error"]["code"] == "deadline_exceeded"


@rows("header", "0", "-1", "soon", "nan", "inf", "")
def test_a_header_that_is_no_time_is_refused(header, ask):
    for path in BODIES:
        answer = ask(path, header=header)
        assert answer.status_code == 400
        assert "X-Request-Timeout" in answer.json()["error"]["message"]


def test_openai_does_not_try_again(service):
    service.engine.delay_s = 5.0
    with service.client(max_retries=2) as client, pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model=MODEL, prompt="Hi", extra_headers={"X-Request-Timeout": "0.05"})
    assert (caught.value.status_code, len(service.engine.requests)) == (504, 1)


@rows("path", *BODIES)
def test_a_body_that_comes_too_late_is_not_awaited(path, service):
    """The rest of it is skipped, so the connection is of use again."""
    body = json.dumps(BODIES[path]).encode()
    connection = HTTPConnection(service.url.removeprefix("http://"), timeout=10)
    with closing(connection):
        connection.putrequest("POST", path)
        connection.putheader("X-Request-Timeout", "0.1")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body[:-1])
        answer = connection.getresponse()
        assert (answer.status, b"0.1 s" in answer.read()) == (504, True)
        connection.send(body[-1:])
        connection.request("GET", "/health/live")
        assert connection.getresponse().status == 200


@one_process_only
@rows("stage", "parsing", "preparing")
@rows("stream", False, True)
def test_the_deadline_holds_while_others_are_read(stage, stream, ask, service, monkeypatch):
    """The lane of large bodies is busy. Work that waits for it is dropped, work that runs is not awaited."""
    context = service.app.state.context
    lane, release, prepared = context.lanes.of(LARGE_BODY_BYTES + 1), threading.Event(), []
    completion = context.converter.completion

    def slow_completion(*given):
        prepared.append(given)
        assert release.wait(20)
        return completion(*given)

    monkeypatch.setattr(context.converter, "completion", slow_completion)
    service.engine.forget()
    if stage == "parsing":
        lane._threads.submit(release.wait, 20)
    text = "a" + " " * LARGE_BODY_BYTES
    try:
        answer = ask("/v1/completions", header="0.3", prompt=text, stream=stream)
    finally:
        release.set()
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    lane._threads.submit(int).result(20)  # what was dropped would come before
    assert (len(prepared), service.engine.requests) == (stage == "preparing", [])


def test_the_field_counts_before_the_request_is_prepared(ask, service, monkeypatch):
    monkeypatch.setattr(service.app.state.context.converter, "completion", lambda *_given: pytest.fail("too late"))
    assert ask("/v1/completions", 1e-9).status_code == 504
