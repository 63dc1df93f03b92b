"""Bodies that cost much (G06, G80, G81): bounded before they are parsed, in a thread, dropped with their client."""

import asyncio
import gc
import json
import threading

import pytest
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from server.body import _parse, component_schemas
from server.errors import BadRequest, TooManyRequests
from server.lanes import LARGE_BODY_BYTES, Lane, Lanes
from server.schema.chat import ChatCompletionRequest
from server.schema.completions import CompletionRequest, DetokenizeRequest, TokenizeRequest
from server.schema.limits import MAX_CONTAINERS, MAX_KEYS, MAX_MESSAGES
from server.tally import OwnTally
from tests.server.conftest import MAX_MODEL_LEN, MAX_REQUESTS, wait_until
from tests.tables import rows

USER = {"role": "user", "content": "Hi"}


def many_keys(count):
    return {f"k{i}": 1 for i in range(count)}


WRONG_MANY_TIMES = [
    ({"messages": [{"role": "assistant", "tool_calls": [1] * 50_000}]}, "messages[0].tool_calls[0]"),
    ({"messages": [USER], "modalities": [1] * 50_000}, "modalities[0]"),
    ({"messages": [USER], **many_keys(50_000)}, None),
    ({"messages": [{"role": "wizard"}] * 20_000}, "messages[0].role"),
    ({"messages": [USER] * (MAX_MESSAGES + 1)}, "messages"),
    ({"messages": [{**USER, **many_keys(50_000)}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 5000}]}, "messages[0].content"),
    ({"messages": [USER], "tools": [1] * 50_000}, "tools[0]"),
    ({"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", **many_keys(9999)}}]}, None),
    ({"messages": [USER], "logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias"),
    ({"messages": [USER], "chat_template_kwargs": many_keys(5000)}, "chat_template_kwargs"),
    ({"messages": [USER], "stop_token_ids": ["a"] * 50_000}, "stop_token_ids[0]"),
]


@rows("body, param", *WRONG_MANY_TIMES)
def test_validation_stops_at_the_first_error_g80(body, param):
    """Validation used to build 300,000 errors, in 2.9 GB, to show the first."""
    with pytest.raises(BadRequest) as refused:
        _parse(json.dumps(body).encode(), ChatCompletionRequest)
    if param is not None:
        assert refused.value.param == param
    with pytest.raises(ValidationError) as invalid:
        ChatCompletionRequest.model_validate(body)
    assert invalid.value.error_count() <= MAX_KEYS


def test_as_many_keys_as_are_accepted_are_each_looked_at_g80():
    body = {"messages": [USER], **many_keys(MAX_KEYS - 1)}
    with pytest.raises(BadRequest, match="unknown parameter 'k0'"):
        _parse(json.dumps(body).encode(), ChatCompletionRequest)


def test_every_list_of_a_request_has_a_limit_g80():
    """Walks the schemas. Lists of token ids are bounded by the model's context instead, which no schema knows."""
    by_context = {("CompletionRequest", "prompt"), ("DetokenizeRequest", "tokens")}
    schemas = component_schemas((ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest))
    unlimited = set()

    def walk(schema, place):
        if schema.get("type") == "array" and "maxItems" not in schema:
            unlimited.add(place)
        if schema.get("type") == "object" and schema.get("additionalProperties") and "maxProperties" not in schema:
            unlimited.add(place)
        for part in [*schema.get("anyOf", ()), schema.get("items")]:
            if isinstance(part, dict):
                walk(part, place)

    for name, schema in schemas.items():
        for field, part in schema.get("properties", {}).items():
            walk(part, (name, field))
    assert unlimited == by_context


def with_containers(count, text=""):
    """A chat body with this many lists and objects; the text may hold brackets of its own."""
    body = {"messages": [{**USER, "content": text}], "metadata": [[] for _ in range(count - 4)]}
    return json.dumps(body).encode()


def test_brackets_are_counted_before_parsing_but_not_those_in_strings_g80():
    _parse(with_containers(MAX_CONTAINERS), ChatCompletionRequest)
    with pytest.raises(BadRequest, match=f"more than the {MAX_CONTAINERS} lists and objects"):
        _parse(with_containers(MAX_CONTAINERS + 1), ChatCompletionRequest)
    text = '"[{\\' * MAX_CONTAINERS + "\n\\"
    assert _parse(with_containers(MAX_CONTAINERS, text), ChatCompletionRequest).messages[0].content == text


@rows("extra", 0, 1)
@rows("is_chunked", False, True)
def test_a_body_of_exactly_the_limit_is_accepted(service, extra, is_chunked):
    limit = service.app.state.context.config.max_body_bytes
    head = b'{"tokens": [5]'
    body = head + b" " * (limit + extra - len(head) - 1) + b"}"
    pieces = (body[i : i + 2**20] for i in range(0, len(body), 2**20))
    with service.http() as http:
        response = http.post("/detokenize", content=pieces if is_chunked else body)
    assert response.status_code == (413 if extra else 200)


def test_ids_far_beyond_the_context_are_refused_g06(service):
    with service.http() as http:
        most = http.post("/detokenize", json={"tokens": [5] * (4 * MAX_MODEL_LEN)})
        more = http.post("/detokenize", json={"tokens": [5] * (4 * MAX_MODEL_LEN + 1)})
    assert most.status_code == 200
    assert more.status_code == 400
    assert more.json()["error"]["param"] == "tokens"


@rows("path", "/v1/chat/completions", "/v1/completions", "/tokenize")
def test_text_that_can_never_fit_is_not_tokenized_g81(service, monkeypatch, path):
    context = service.app.state.context
    most = MAX_MODEL_LEN * context.converter.tokenizer.max_token_bytes * (4 if path == "/tokenize" else 1)
    lengths = []

    def encode(text, *, allow_special=True):
        lengths.append(len(text.encode()))
        return [5]

    monkeypatch.setattr(context.converter.tokenizer, "encode", encode)

    def ask(num_bytes):
        text = "é" * (num_bytes // 2) + " " * (num_bytes % 2)
        fields = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
        with service.http() as http:
            return http.post(path, json=fields)

    response = ask(most + 1)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert lengths == []
    if "chat" not in path:  # there the template adds text of its own
        assert ask(most).status_code == 200
        assert lengths == [most]


def test_a_full_queue_is_seen_before_tokenizing_g81(service, monkeypatch):
    service.engine.script = lambda _request: [[5]] * 50
    service.engine.delay_s = 60
    context = service.app.state.context
    hog = threading.Thread(target=leave_after, args=(service, {"prompt": "a", "n": MAX_REQUESTS - 1}))
    hog.start()
    wait_until(lambda: context.gate.num_by_client.total() == MAX_REQUESTS - 1)
    monkeypatch.setattr(context.converter, "completion", lambda *_args: pytest.fail("it was tokenized"))
    with service.http() as http:
        response = http.post("/v1/completions", json={"prompt": ["a", "b"]})
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "queue_full"
    hog.join()
    wait_until(lambda: context.gate.num_by_client.total() == 0)


def leave_after(service, body, timeout_s=1.0):
    with service.http() as http, pytest.raises(Exception, match="timed out"):
        http.post("/v1/completions", json=body, timeout=timeout_s)


def test_large_work_holds_up_no_small_work_g80(service, monkeypatch):
    """The lane of large bodies is blocked: a stranger's small request and the health routes are served."""
    context = service.app.state.context
    blocked, release = threading.Event(), threading.Event()
    encode = context.converter.tokenizer.encode

    def slow_encode(text, **options):
        if len(text) > LARGE_BODY_BYTES:
            blocked.set()
            assert release.wait(20)
        return encode(text, **options)

    monkeypatch.setattr(context.converter.tokenizer, "encode", slow_encode)
    with service.http() as http:
        answers = []
        body = {"prompt": " " * (LARGE_BODY_BYTES + 1)}
        large = threading.Thread(target=lambda: answers.append(http.post("/tokenize", json=body)))
        large.start()
        assert blocked.wait(20)
        assert http.get("/health/live").status_code == 200
        assert http.post("/tokenize", json={"prompt": "a"}).status_code == 200
        release.set()
        large.join()
    assert answers[0].json()["count"] > 0


class Client:
    """What a request's `receive` says: nothing until the client leaves."""

    def __init__(self):
        self.has_left = asyncio.Event()

    async def receive(self):
        await self.has_left.wait()
        return {"type": "http.disconnect"}


def test_work_of_a_client_that_left_is_dropped_g81():
    async def main():
        lane = Lane("test", num_threads=1).for_client("one")
        begun, release, done = threading.Event(), threading.Event(), []
        first = asyncio.create_task(lane.run(Client().receive, lambda: (begun.set(), release.wait(20))))
        await asyncio.to_thread(begun.wait, 20)
        leaver, stayer = Client(), Client()
        left = asyncio.create_task(lane.run(leaver.receive, done.append, "left"))
        stayed = asyncio.create_task(lane.run(stayer.receive, done.append, "stayed"))
        await asyncio.sleep(0)
        leaver.has_left.set()
        with pytest.raises(ClientDisconnect):
            await left
        release.set()
        await first
        await stayed
        assert done == ["stayed"]

    asyncio.run(main())


def test_the_lane_of_large_bodies_has_a_bound_g81():
    async def main():
        lane = Lane("test", num_threads=1, max_waiting=2).for_client("one")
        release = threading.Event()
        taken = [asyncio.create_task(lane.run(Client().receive, release.wait, 20)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(TooManyRequests):
            await lane.run(Client().receive, release.wait, 20)
        release.set()
        await asyncio.gather(*taken)
        assert await lane.run(Client().receive, str, 5) == "5"

    asyncio.run(main())


def test_a_refused_body_is_freed_at_once_g80():
    """The error, its frames and its future used to keep each other alive, and all that was parsed."""
    content = json.dumps({"messages": [{"role": "assistant", "tool_calls": [1] * 150_000}]}).encode()

    async def main():
        lane = Lane("test", num_threads=1).for_client("one")
        with pytest.raises(BadRequest):
            await lane.run(Client().receive, _parse, content, ChatCompletionRequest)
        lane.lane._threads.shutdown()  # else its thread may still hold what it has just done

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
        assert not [each for each in gc.get_objects() if type(each) is list and len(each) >= 150_000]
    finally:
        gc.enable()


def test_memory_is_given_back_once_after_much_work_g80(monkeypatch):
    monkeypatch.setattr("server.lanes._TIDY_DELAY_S", 0.05)

    async def main():
        tidied = threading.Semaphore(0)
        lane = Lane("test", num_threads=1, after_work=tidied.release).for_client("one")
        await asyncio.gather(*(lane.run(Client().receive, str, i) for i in range(5)))
        assert await asyncio.to_thread(tidied.acquire, timeout=10)
        assert not tidied.acquire(blocking=False)
        await lane.run(Client().receive, str, 5)
        assert await asyncio.to_thread(tidied.acquire, timeout=10)

    asyncio.run(main())


def test_a_body_takes_the_lane_of_its_size():
    lanes = Lanes(OwnTally())
    assert lanes.of(0) is lanes.of(LARGE_BODY_BYTES)
    assert lanes.of(LARGE_BODY_BYTES + 1) is not lanes.of(0)
