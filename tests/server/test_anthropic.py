"""Anthropic's Messages API over real HTTP, with Anthropic's own client as the judge."""

import json
from contextlib import contextmanager

import pytest

from tests.server.conftest import ANSWER, CALL, MAX_MODEL_LEN, MODEL, FakeEngine, serve
from tests.tables import rows

USER = [{"role": "user", "content": "What is the capital of France?"}]
PARIS, THOUGHT = "The capital of France is Paris.", "The user asks for a capital."
TOOL = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TWO_CALLS = (
    "<|channel|>analysis<|message|>Both.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.get_weather<|message|>{"city": "Rome"}<|end|>'
    '<|start|>assistant<|channel|>commentary to=functions.get_weather<|message|>{"city": "Bern"}<|call|>'
)
TAIL = "<|start|>assistant"


@contextmanager
def client_of(service, **options):
    import anthropic  # takes a second, so only the process that runs this file imports it

    with anthropic.Anthropic(base_url=service.url, **{"api_key": "none", "max_retries": 0, **options}) as client:
        yield client


@pytest.fixture
def ask(service, harmony):
    """Ask the server; the engine answers with the transcript given."""
    with client_of(service) as client:

        def create(transcript=ANSWER, **fields):
            service.engine.script = lambda _request: harmony(transcript)
            return client.messages.create(**{"model": MODEL, "max_tokens": 200, "messages": USER, **fields})

        create.client = client
        yield create


@pytest.fixture
def prompt_of(ask, service, tokenizer):
    """The prompt that the model gets."""

    def prompt(**fields):
        ask(**fields)
        return tokenizer.decode(service.engine.requests[-1].prompt_ids)

    return prompt


def plain(message):
    """A message without what is new each time."""
    data = message.model_dump(exclude_none=True)
    for block in data["content"]:
        block.pop("id", None)
    return {**data, "id": ""}


def test_a_message(ask, harmony):
    message = ask()
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text) == (THOUGHT, PARIS)
    assert message.content[0].signature
    assert (message.role, message.model, message.stop_reason, message.stop_sequence) == (
        "assistant", MODEL, "end_turn", None,
    )  # fmt: skip
    assert message.id.startswith("msg_")
    assert message._request_id
    usage = message.usage
    assert usage.output_tokens == len(harmony(ANSWER))
    assert 0 < usage.output_tokens_details.thinking_tokens < usage.output_tokens
    assert usage.input_tokens > 0
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (0, 0)


def test_tokens_of_the_prefix_cache_are_told_apart(ask, service):
    whole = ask().usage.input_tokens
    service.engine.last = lambda *_asked: {"num_cached_tokens": 16}
    usage = ask().usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (whole - 16, 16)


@rows(
    "transcript, fields",
    (ANSWER, {}),
    (CALL, {"tools": [TOOL]}),
    (TWO_CALLS, {"tools": [TOOL]}),
    (ANSWER, {"stop_sequences": ["France"]}),
    (ANSWER, {"max_tokens": 8}),
    ("<|channel|>final<|message|><|return|>", {}),
)
def test_a_streamed_message_is_the_whole_one(transcript, fields, ask):
    whole = ask(transcript, **fields)
    with ask.client.messages.stream(**{"model": MODEL, "max_tokens": 200, "messages": USER, **fields}) as stream:
        for _event in stream:
            pass
        streamed = stream.get_final_message()
    assert plain(streamed) == plain(whole)
    assert len(streamed.content) == len(whole.content)


def test_events_come_in_order(ask, service):
    with ask(TWO_CALLS, tools=[TOOL], stream=True) as stream:
        events = list(stream)
    kinds = [event.type for event in events if event.type != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", *4 * block, "message_delta", "message_stop"]
    assert [event.index for event in events if event.type == "content_block_start"] == [0, 1, 2, 3]
    deltas = {}
    for event in events:
        if event.type == "content_block_delta":
            deltas.setdefault(event.index, []).append(event.delta.type)
    assert [sorted(set(each)) for each in deltas.values()] == [
        ["signature_delta", "thinking_delta"], ["text_delta"], ["input_json_delta"], ["input_json_delta"],
    ]  # fmt: skip
    assert deltas[0][-1] == "signature_delta"
    assert events[0].message.content == []
    assert events[0].message.stop_reason is None
    body = {"model": MODEL, "max_tokens": 9, "messages": USER, "stream": True}
    with service.http() as http:
        response = http.post("/v1/messages", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    assert names == [json.loads(line.removeprefix("data: "))["type"] for line in lines[1::2]]
    assert names[:2] == ["message_start", "ping"]


@rows(
    "fields, reason, sequence, text",
    ({}, "end_turn", None, PARIS),
    ({"max_tokens": 3}, "max_tokens", None, ""),
    ({"stop_sequences": ["nothing", " of Fr"]}, "stop_sequence", " of Fr", "The capital"),
)
def test_stop_reasons(fields, reason, sequence, text, ask):
    message = ask(**fields)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert "".join(block.text for block in message.content if block.type == "text") == text


def test_tools_go_round(ask, prompt_of):
    """Thinking, text and two calls come back as they were sent, with the results in the order of the calls."""
    first = ask(TWO_CALLS, tools=[TOOL])
    assert first.stop_reason == "tool_use"
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    rome, bern = first.content[2:]
    assert (rome.name, rome.input, bern.input) == ("get_weather", {"city": "Rome"}, {"city": "Bern"})
    results = [
        {"type": "tool_result", "tool_use_id": bern.id, "content": [{"type": "text", "text": "snow"}]},
        {"type": "tool_result", "tool_use_id": rome.id, "content": "no such city", "is_error": True},
        {"type": "text", "text": "Short, please."},
    ]
    turns = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    prompt = prompt_of(messages=turns, tools=[TOOL])
    parts = [
        "What is the capital", "Both.", "Let me look.", "Rome", "Bern", "Error: no such city", "snow", "Short, please.",
    ]  # fmt: skip
    places = [prompt.rindex(part) for part in parts]
    assert places == sorted(places)
    assert prompt.endswith(TAIL)


@rows(
    "choice, in_prompt, calls",
    (None, True, 2),
    ({"type": "auto"}, True, 2),
    ({"type": "auto", "disable_parallel_tool_use": True}, True, 1),
    ({"type": "none"}, False, 0),
)
def test_tool_choice(choice, in_prompt, calls, ask, prompt_of):
    fields = {"tools": [TOOL]} | ({} if choice is None else {"tool_choice": choice})
    assert ("get_weather" in prompt_of(transcript=ANSWER, **fields)) == in_prompt
    answer = ask(TWO_CALLS, **fields)
    assert sum(block.type == "tool_use" for block in answer.content) == calls
    assert (answer.stop_reason == "tool_use") == bool(calls)


@rows(
    "choice, wanted",
    ({"type": "any"}, True),
    ({"type": "tool", "name": "get_weather"}, True),
    ({"type": "auto"}, False),
)
def test_forced_calls_are_bound_by_the_engine(choice, wanted, ask, service):
    ask(CALL, tools=[TOOL], tool_choice=choice)
    grammar = service.engine.requests[-1].grammar
    assert (grammar is not None) == wanted
    assert grammar is None or "functions.get_weather" in grammar.format_json


def test_a_schema_binds_the_text(ask, service):
    import anthropic

    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    ask(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert "city" in service.engine.requests[-1].grammar.format_json
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema.*not"):
        ask(output_config={"format": {"type": "json_schema", "schema": {"properties": {"a": {"not": {}}}}}})


TOO_DEEP = '{"a": ' + "[" * 300 + "]" * 300 + "}"


@rows(
    "arguments, shown",
    ('{"city": ', {"arguments": '{"city": '}),
    ("[1]", {"arguments": "[1]"}),
    ("", {}),
    (TOO_DEEP, {"arguments": TOO_DEEP}),
)
def test_arguments_that_are_no_object_are_not_lost(arguments, shown, ask):
    transcript = f"<|channel|>commentary to=functions.get_weather<|message|>{arguments}<|call|>"
    assert ask(transcript, tools=[TOOL], max_tokens=1000).content[-1].input == shown


def test_system_prompts_are_text_or_blocks(prompt_of):
    blocks = [
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Rhyme."},
    ]
    assert prompt_of(system="Be brief.\nRhyme.") == prompt_of(system=blocks) != prompt_of()
    in_turns = [{"role": "system", "content": "Be brief.\nRhyme."}, *USER]
    assert prompt_of(messages=in_turns) == prompt_of(system=blocks)
    as_blocks = [{"role": "user", "content": [{"type": "text", "text": USER[0]["content"]}]}]
    assert prompt_of(messages=as_blocks) == prompt_of()


def test_a_last_message_of_the_assistant_is_continued(ask, prompt_of, harmony):
    begun = [*USER, {"role": "assistant", "content": "The best answer is ("}]
    assert prompt_of(messages=begun).endswith("<|channel|>final<|message|>The best answer is (")
    assert [block.text for block in ask("B)<|return|>", messages=begun).content] == ["B)"]


@rows(
    "thinking, num_tokens",
    ({"type": "enabled", "budget_tokens": 30}, 30),
    ({"type": "disabled"}, 0),
    ({"type": "adaptive"}, None),
)
def test_thinking_has_a_budget(thinking, num_tokens, ask, service, harmony):
    ask(thinking=thinking)
    budget = service.engine.requests[-1].sampling.thinking
    assert (budget and budget.num_tokens) == num_tokens
    if budget:
        assert list(budget.begin_ids) == harmony("<|channel|>analysis<|message|>")
        assert list(budget.close_ids) == harmony("<|end|><|start|>assistant<|channel|>")


def test_settings_reach_the_engine(ask, service):
    sent = {"temperature": 0.25, "top_p": 0.5, "top_k": 7}  # newer clients do not name them any more
    ask(extra_body=sent, metadata={"user_id": "me"}, service_tier="auto")
    sampling = service.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.25, 0.5, 7, 200)


def test_models_have_all_that_the_client_declares(ask):
    from anthropic.types import ModelInfo

    [listed] = ask.client.models.list()
    assert listed == ask.client.models.retrieve(MODEL)
    needed = {name for name, field in ModelInfo.model_fields.items() if field.is_required()}
    assert needed <= listed.model_dump(exclude_unset=True).keys()
    model = ModelInfo.model_validate(listed.model_dump())
    assert (model.id, model.display_name, int(model.created_at.timestamp())) == (MODEL, MODEL, listed.created)


def test_count_tokens(ask, service):
    fields = {"model": MODEL, "messages": USER, "tools": [TOOL], "system": "Be brief."}
    count = ask.client.messages.count_tokens(**fields).input_tokens
    assert count == ask(**{**fields, "transcript": ANSWER}).usage.input_tokens
    service.engine.forget()
    long = [{"role": "user", "content": "word " * MAX_MODEL_LEN}]
    assert ask.client.messages.count_tokens(model=MODEL, messages=long).input_tokens > MAX_MODEL_LEN
    assert service.engine.requests == []


USE = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
BAD = {
    "messages": [
        ([], "messages"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "image", "source": {}}]}], "messages[0].content[0].type"),
        (
            [{"role": "user", "content": [USE]}],
            "messages[0].content[0]",
        ),
        (
            [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}],
            "messages[0].content[0].tool_use_id",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([*USER, {"role": "assistant", "content": []}], "messages"),
        ([*USER, {"role": "assistant", "content": [USE, {"type": "text", "text": "a"}]}], "messages"),
    ],
    "max_tokens": [(0, "max_tokens"), (MAX_MODEL_LEN, "max_tokens")],
    "tools": [
        ([{"name": "a b", "input_schema": {}}], "tools[0].name"),
        ([{"name": "a"}], "tools[0].input_schema"),
        ([{"type": "web_search_20250305", "name": "web_search"}], "tools[0].type"),
    ],
    "tool_choice": [({"type": "tool"}, "tool_choice.name"), ({"type": "auto", "name": "x"}, "tool_choice.name")],
    "thinking": [
        ({"type": "enabled"}, "thinking.budget_tokens"),
        ({"type": "enabled", "budget_tokens": 200}, "thinking.budget_tokens"),
        ({"type": "adaptive", "display": "hidden"}, "thinking.display"),
    ],
    "stop_sequences": [([""], "stop_sequences")],
    "output_config": [({"effort": "most"}, "output_config.effort")],
    "container": [("x", "container")],
}


def test_bad_fields_are_named_in_anthropics_error(ask, service, subtests):
    import anthropic

    for field, values in BAD.items():
        for value, named in values:
            with subtests.test(field=field, value=value), pytest.raises(anthropic.BadRequestError) as caught:
                ask(**{field: value})
            body = caught.value.body
            assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
            assert named in body["error"]["message"], (named, body)
            assert body["request_id"] == caught.value.request_id
    assert service.engine.requests == []


@rows(
    "path, method, status, kind",
    ("/v1/messages/nothing", "GET", 404, "not_found_error"),
    ("/v1/messages", "GET", 405, "invalid_request_error"),
    ("/v1/messages", "POST", 401, "authentication_error"),
)
def test_errors_of_every_layer_are_anthropics(path, method, status, kind, tokenizer):
    with serve(FakeEngine(), tokenizer, api_key="secret") as service, service.http() as http:
        headers = {} if status == 401 else {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
        answer = http.request(method, path, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
        assert answer.json()["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


def test_clients_are_told_what_went_wrong(tokenizer):
    import anthropic

    with serve(FakeEngine(), tokenizer, api_key="secret") as service:
        fields = {"model": MODEL, "max_tokens": 5, "messages": USER}
        with client_of(service, api_key="secret") as client:
            assert client.messages.create(**fields).type == "message"
            with pytest.raises(anthropic.NotFoundError):
                client.messages.create(**{**fields, "model": "other"})
            service.engine.ready = False
            with pytest.raises(anthropic.InternalServerError) as caught:
                client.messages.create(**fields)
            assert caught.value.body["error"]["type"] == "overloaded_error"
            service.engine.ready = True
            service.engine.last = lambda *_asked: {"finish_reason": "error", "error": "too hot"}
            with pytest.raises(anthropic.InternalServerError, match="too hot"):
                client.messages.create(**fields)
            with (
                pytest.raises(anthropic.APIStatusError, match="too hot") as caught,
                client.messages.stream(**fields) as stream,
            ):
                list(stream)
            assert caught.value.body["request_id"] == stream.response.headers["request-id"]
        with client_of(service, api_key="wrong") as client, pytest.raises(anthropic.AuthenticationError):
            client.messages.create(**fields)
        with client_of(service, api_key=None, auth_token="secret") as client:
            service.engine.last = None
            assert client.messages.create(**fields).type == "message"


def test_the_bundled_model_answers(bundled_url):
    import anthropic

    """The real engine: an answer, and reasoning that ends when its budget is used."""
    with anthropic.Anthropic(base_url=bundled_url, api_key="none") as client:
        fields = {"model": client.models.list().data[0].id, "max_tokens": 80, "messages": USER}
        free = client.messages.create(**fields, extra_body={"temperature": 0})
        assert free.content[-1].text
        none = client.messages.create(**fields, extra_body={"temperature": 0}, thinking={"type": "disabled"})
        assert all(block.type != "thinking" for block in none.content)
        assert none.usage.output_tokens_details.thinking_tokens == 0
        assert none.content[-1].text
        for thinking in ({"type": "adaptive"}, {"type": "disabled"}):  # a call that nobody would make by himself
            forced = client.messages.create(**fields, tools=[TOOL], tool_choice={"type": "any"}, thinking=thinking)
            assert forced.stop_reason == "tool_use"
            assert isinstance(forced.content[-1].input["city"], str)
