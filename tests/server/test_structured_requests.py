"""Structured outputs and forced calls as requests: what is refused and by which field, and what the engine gets."""

import json

import pytest

from server.schema.chat import ChatCompletionRequest
from tests.server.conftest import MODEL, WEATHER
from tests.tables import rows

USER = {"role": "user", "content": "hi"}
OTHER = {"type": "function", "function": {"name": "other"}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}


def schema_format(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def tool_with(parameters, **more):
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


def named(name):
    return {"type": "function", "function": {"name": name}}


def allowed(mode, *names):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def outputs(**fields):
    return {"structured_outputs": fields}


def deep(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


IN_SCHEMA = "response_format.json_schema.schema"


@pytest.fixture
def http(service):
    with service.http() as http:
        yield http


def ask(http, path="chat/completions", **fields):
    body = {"messages": [USER]} if path == "chat/completions" else {"prompt": "hi"}
    return http.post(f"/v1/{path}", json={"model": MODEL, **body, **fields})


REFUSED_FORMATS = [
    ({"type": "xml"}, "response_format", "'xml' is not supported"),
    ({"type": "json_schema"}, "response_format.json_schema", "needs it"),
    ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.name", "missing"),
    ({"type": "text", "format": {}}, "response_format.type", "structural_tag"),
    ({"type": "structural_tag"}, "response_format.format", "needs it"),
    (schema_format({"type": "strnig"}), f"{IN_SCHEMA}.type", "one or several of"),
    (schema_format({"type": {}}), f"{IN_SCHEMA}.type", "one or several of"),
    (schema_format({"properties": {"x": {"format": []}}}), f"{IN_SCHEMA}.properties.x.format", "must be a string"),
    (schema_format({"properties": {"x": {"type": "string", "pattern": "(a"}}}), f"{IN_SCHEMA}.properties.x.pattern",
     "not closed"),
    (schema_format({"type": "array", "items": {"not": {}}}), f"{IN_SCHEMA}.items.not", "not supported"),
    (schema_format({"anyOf": [True, {"$ref": "#/$defs/x"}]}), f"{IN_SCHEMA}.anyOf[1].$ref", "nothing at"),
    (schema_format({"type": "array", "uniqueItems": True}), f"{IN_SCHEMA}.uniqueItems", "maxItems: 1"),
    (schema_format({"type": "integer", "minimum": 3, "maximum": 1}), IN_SCHEMA, "no value satisfies"),
    (schema_format({"required": ["x"], "additionalProperties": False}), IN_SCHEMA, "the required property 'x'"),
    (schema_format(deep(80)), f"{IN_SCHEMA}.items.items.items.items", "64 deep"),
]  # fmt: skip


@rows("wanted, param, words", *REFUSED_FORMATS)
def test_response_formats_that_cannot_be_honoured_are_refused_where_they_fail(http, wanted, param, words):
    response = ask(http, response_format=wanted)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].startswith(param), error
    assert words in error["message"]


REFUSED_FIELDS = [
    (outputs(), "structured_outputs", "exactly one"),
    (outputs(regex="a", choice=["b"]), "structured_outputs", "exactly one"),
    (outputs(regex="a(?=b)"), "structured_outputs.regex", "not supported"),
    (outputs(regex="a{99999999999}"), "structured_outputs.regex", "at most 10000000 times"),
    (outputs(choice=[]), "structured_outputs.choice", "at least 1"),
    (outputs(choice=[""]), "structured_outputs.choice", "empty"),
    (outputs(json="{"), "structured_outputs.json", "not valid JSON"),
    (outputs(json='{"minLength": 1e400}'), "structured_outputs.json", "not valid JSON"),
    (outputs(json='{"type": "integer", "enum": [Infinity]}'), "structured_outputs.json", "not valid JSON"),
    (outputs(json="[" * 100_000), "structured_outputs.json", "not valid JSON"),
    (outputs(json={"items": 5}), "structured_outputs.json.items", "object or a boolean"),
    (outputs(whitespace_pattern=" "), "structured_outputs.whitespace_pattern", "unknown"),
    ({**outputs(regex="a"), "response_format": {"type": "json_object"}}, "structured_outputs", "either"),
    ({"guided_json": {}}, "guided_json", "structured_outputs with 'json'"),
    ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern", "structured_outputs"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tool_choice": "any"}, "tool_choice", "required"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
    ({"tools": [WEATHER], "tool_choice": named("x")}, "tool_choice", "'x'"),
    ({"tools": [WEATHER], "tool_choice": allowed("auto", "get_weather", "x")}, "tool_choice", "'x'"),
    ({"tools": [WEATHER], "tool_choice": allowed("maybe", "get_weather")}, "tool_choice.allowed_tools.mode", "auto"),
    ({"tools": [tool_with({"not": {}}, strict=True)]}, "tools[0].function.parameters.not", "not supported"),
    ({"tools": [tool_with({"type": "string"}, strict=True)]}, "tools[0].function.parameters.type", "an object"),
]


@rows("fields, param, words", *REFUSED_FIELDS)
def test_other_fields_that_cannot_be_honoured_are_refused_by_name(http, fields, param, words):
    response = ask(http, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], words in error["message"]) == (param, True), error


TAG_SCHEMA = {"type": "json_schema", "json_schema": {"items": {"not": {}}}}
REFUSED_TAGS = [
    ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, TAG_SCHEMA]}},
     "response_format.format.elements[1].json_schema.items.not"),
    ({"format": {"type": "regex", "pattern": "(?=a)"}}, "response_format.format.pattern"),
    ({"structures": [{"begin": "<f>"}], "triggers": ["<f>"]}, "response_format.structures[0]"),
    ({"structures": [{"begin": "<f>", "schema": {"type": 5}, "end": "</f>"}], "triggers": ["<f>"]},
     "response_format.structures[0].schema.type"),
]  # fmt: skip


@rows("tag, param", *REFUSED_TAGS)
def test_schemas_inside_structural_tags_are_checked_too(http, tag, param):
    response = ask(http, response_format={"type": "structural_tag", **tag})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_tag_may_be_wrapped_or_written_as_text(service, http):
    inner = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</a>"}
    for tag in (inner, {"type": "structural_tag", "format": inner}, json.dumps(inner)):
        service.engine.forget()
        assert ask(http, structured_outputs={"structural_tag": tag}).status_code == 200
        assert '"begin":"<a>"' in service.engine.requests[0].grammar.format_json


@rows(
    "fields, is_bound",
    ({}, False),
    ({"response_format": {"type": "text"}}, False),
    ({"response_format": {"type": "json_object"}}, True),
    ({"response_format": schema_format({"type": "object"}, strict=False)}, True),
    (outputs(json_object=True), True),
    ({"tools": [WEATHER]}, False),
    ({"tools": [WEATHER], "tool_choice": "auto", "parallel_tool_calls": False}, False),
    ({"tools": [STRICT]}, True),
    ({"tools": [WEATHER], "tool_choice": "none"}, True),
    ({"tools": [WEATHER], "tool_choice": "required"}, True),
    ({"tools": [WEATHER, OTHER], "tool_choice": allowed("auto", "other")}, True),
    ({"tool_choice": "none"}, False),
    ({"guided_json": None}, False),
)
def test_only_a_request_that_asks_for_it_is_bound(service, http, fields, is_bound):
    service.engine.forget()
    assert ask(http, **fields, n=2).status_code == 200
    grammars = [request.grammar for request in service.engine.requests]
    assert [grammar is not None for grammar in grammars] == [is_bound] * 2
    assert grammars[0] == grammars[1]


def test_a_schema_that_is_not_strict_is_honoured_where_it_can_be(service, http):
    """Without `strict` a schema that cannot be honoured is no error: the arguments are any object."""
    tools = [tool_with({"properties": {"x": {"not": {}}}}), WEATHER]
    assert ask(http, tools=tools, tool_choice="required").status_code == 200
    grammar = service.engine.requests[0].grammar.format_json
    assert '"city"' in grammar
    assert '"x"' not in grammar


@rows("field", "response_format", "structured_outputs")
def test_raw_completions_are_bound_too(service, http, field):
    service.engine.forget()
    wanted = {"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["yes", "no"]}}[field]
    assert ask(http, "completions", **{field: wanted}).status_code == 200
    assert service.engine.requests[0].grammar.param.startswith(field)
    assert "<|" not in service.engine.requests[0].grammar.format_json


def test_the_order_of_properties_is_kept(service, http):
    names = ["z", "a", "m"]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names}
    assert ask(http, response_format=schema_format(schema)).status_code == 200
    grammar = json.loads(service.engine.requests[0].grammar.format_json)
    assert names == _find(grammar, "properties")


def _find(tree, key):
    """The keys of the first object under a key."""
    if isinstance(tree, dict) and isinstance(tree.get(key), dict) and tree[key]:
        return list(tree[key])
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return next((found for each in inner if (found := _find(each, key))), None)


def test_the_openapi_schema_takes_every_tool_choice():
    choice = ChatCompletionRequest.model_json_schema()["properties"]["tool_choice"]
    assert {"enum": ["auto", "none", "required"]} in choice["anyOf"]


CONTINUED = {"messages": [USER, {"role": "assistant", "content": "{"}], "continue_final_message": True}


def test_a_prompt_that_does_not_end_where_an_answer_begins_names_the_fields(http):
    """A continued answer is bound from there on. A call cannot stand inside it."""
    json_object = {"response_format": {"type": "json_object"}}
    assert ask(http, **CONTINUED, **json_object).status_code == 200
    for fields, param in (
        ({**json_object, "add_generation_prompt": False}, "response_format"),
        ({**CONTINUED, "tools": [OTHER], "tool_choice": "required"}, "tool_choice"),
    ):
        response = ask(http, **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert "leave out continue_final_message, add_generation_prompt" in error["message"]
