"""The OpenAPI document says what routes take and give: references, limits, statuses, errors, events of streams."""

import jsonschema_rs
import orjson
import pytest

from loaders.tokenizer import load_tokenizer
from server.app import create_app
from server.config import ServerConfig
from tests.server.api_readers import APIS, Chat
from tests.server.conftest import ANSWER, ASSETS, CALL, MODEL, WEATHER, FakeEngine, serve
from tests.tables import rows

TOKENIZER = load_tokenizer(ASSETS)
DOCUMENT = create_app(FakeEngine(), TOKENIZER, ServerConfig()).openapi()
LIMITED_BY_THE_MODEL = {"CompletionRequest.prompt", "DetokenizeRequest.tokens"}
"""Lists of token ids: how many are accepted depends on the model's context."""


def parts(value, path=""):
    """All objects inside a JSON value, with their paths."""
    if isinstance(value, dict):
        yield path, value
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from parts(inner, f"{path}/{key}")


def schema_of(path, status="200", media_type="application/json"):
    """The schema of an answer, with what it refers to."""
    content = DOCUMENT["paths"][path]["post"]["responses"][status]["content"]
    return {**content[media_type]["schema"], "components": DOCUMENT["components"]}


def event_schema_of(path):
    """The schema of the JSON in an event."""
    data = schema_of(path, media_type="text/event-stream")["properties"]["data"]
    kinds = [kind for kind in data.get("anyOf", [data]) if "contentSchema" in kind]
    return {"anyOf": [kind["contentSchema"] for kind in kinds], "components": DOCUMENT["components"]}


def test_every_reference_leads_somewhere():
    known = {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}
    references = {part["$ref"] for _, part in parts(DOCUMENT) if isinstance(part.get("$ref"), str)}
    assert len(references) > 20
    assert references <= known


def bodies():
    """Names of what requests are made of."""
    schemas = DOCUMENT["components"]["schemas"]
    names, found = [name for name in schemas if name.endswith("Request")], set()
    while names:
        name = names.pop()
        if name not in found:
            found.add(name)
            references = [part["$ref"] for _, part in parts(schemas[name]) if isinstance(part.get("$ref"), str)]
            names += [reference.rpartition("/")[2] for reference in references]
    return found


def test_every_list_of_a_request_has_a_limit():
    unlimited = set()
    for name in bodies():
        for path, part in parts(DOCUMENT["components"]["schemas"][name]):
            if part.get("type") == "array" and "maxItems" not in part:
                unlimited.add(f"{name}.{path.split('/')[2]}")
    assert unlimited == LIMITED_BY_THE_MODEL


@rows("path", *(api.path for api in APIS.values()), "/v1/messages/count_tokens")
def test_routes_that_read_a_conversation_have_the_same_statuses(path):
    responses = DOCUMENT["paths"][path]["post"]["responses"]
    of_answers = {"499", "504"} if path != "/v1/messages/count_tokens" else set()  # aborts and deadlines
    expected = DOCUMENT["paths"]["/v1/completions"]["post"]["responses"].keys() - {"499", "504"}
    assert responses.keys() == expected | of_answers
    assert ("text/event-stream" in responses["200"]["content"]) == (path != "/v1/messages/count_tokens")


@pytest.fixture(scope="module")
def service():
    with serve(FakeEngine(), TOKENIZER) as service:
        yield service


@rows(
    "prompt, is_taken",
    ("a", True),
    (["a", "b"], True),
    ([1, 2], True),
    ([[1, 2], [3]], True),
    (["a", [3]], True),
    ([], False),
    ([[]], False),
    ([1, "a"], False),
    ([-1], False),
    ([[2**31]], False),
    (["a"] * 129, False),
)
def test_prompts_are_taken_exactly_as_described(service, prompt, is_taken):
    schema = {**DOCUMENT["components"]["schemas"]["CompletionRequest"], "components": DOCUMENT["components"]}
    with service.http() as http:
        answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    is_described = jsonschema_rs.is_valid(schema, {"prompt": prompt})
    assert (answer.status_code == 200, is_described) == (is_taken, is_taken)


@rows("transcript", ANSWER, CALL)
@rows("name", *APIS)
def test_answers_and_each_event_are_as_described(service, name, transcript):
    api = APIS[name]
    service.engine.script = lambda _request: TOKENIZER.encode(transcript)
    fields = {"model": MODEL, **api.question("Hi"), "tools": api.tools([WEATHER["function"]])}
    with service.http() as http:
        whole, stream = (http.post(api.path, json={**fields, **more}) for more in ({}, api.stream_fields))
        refused = http.post(api.path, json={**fields, "temperature": 9})
    jsonschema_rs.validate(schema_of(api.path), whole.json())
    blocks = stream.text.split("\n\n")[: -2 if isinstance(api, Chat) else -1]
    events = [orjson.loads(block.rpartition("data: ")[2]) for block in blocks]
    assert len(events) > 5
    for event in events:
        jsonschema_rs.validate(event_schema_of(api.path), event)
    if not isinstance(api, Chat):
        described = event_schema_of(api.path)["anyOf"][0]["properties"]
        assert {key for event in events for key in event} <= described.keys()
    jsonschema_rs.validate(schema_of(api.path, "400"), refused.json())
