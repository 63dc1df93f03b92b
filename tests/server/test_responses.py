"""POST /v1/responses in GPT-OSS's and DeepSeek's dialect; the official client's types judge every answer and event."""

import openai
import orjson
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from engine.types import EngineOutput
from loaders.tokenizer import load_tokenizer
from tests.server.conftest import ANSWER, ASSETS, CALL, MODEL, WEATHER, FakeEngine, serve
from tests.server.scripted_model import deepseek_tokenizer
from tests.tables import rows

EVENT = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", **WEATHER["function"]}
PREAMBLE = (
    "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant" + CALL.removesuffix("<|call|>") + "<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_weather<|message|>{}<|call|>"
)
DEEPSEEK_ANSWER = "The user asks for a capital.</think>The capital of France is Paris.<｜end▁of▁sentence｜>"
DEEPSEEK_CALL = (
    "I need the weather.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    return deepseek_tokenizer(tmp_path_factory.mktemp("deepseek") / "model")


@pytest.fixture(scope="module")
def services(deepseek):
    """For each dialect: its service, the transcripts of an answer and a call, and the thinking that it needs."""
    harmony = load_tokenizer(ASSETS)
    with serve(FakeEngine(), harmony) as first, serve(FakeEngine(), deepseek, default_temperature=0.5) as second:
        yield {
            "harmony": (first, harmony, ANSWER, CALL),
            "deepseek": (second, deepseek, "<think>" + DEEPSEEK_ANSWER, "<think>" + DEEPSEEK_CALL),
        }


def script(service, tokenizer, transcript):
    service.engine.script = lambda _request: tokenizer.encode(transcript)


def checked_stream(service, **fields):
    """The events of a stream, after checking each by the client's types, their order, and that they add up."""
    body = {"model": MODEL, "stream": True, **fields}
    with service.http() as http:
        answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    events = []
    for number, block in enumerate(answer.text.split("\n\n")[:-1]):
        name, data = block.split("\n")
        event = orjson.loads(data.removeprefix("data: "))
        EVENT.validate_python(event)
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        events.append(event)
    check_items(events)
    return events


def check_items(events):
    """Created, in progress, then one item after the other, each closed before the next; the last event has them all."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] in ("completed", "incomplete", "failed")
    done, open_item, deltas = [], None, ""
    for kind, event in zip(kinds[2:-1], events[2:-1], strict=True):
        assert event["output_index"] == len(done)
        if kind == "output_item.added":
            assert open_item is None
            open_item, deltas = event["item"], ""
            assert open_item["status"] == "in_progress"
        elif kind == "output_item.done":
            item = event["item"]
            assert {**item, **{key: open_item[key] for key in ("status", "content", "arguments") if key in item}} == (
                open_item
            )
            assert deltas == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
            done.append(item)
            open_item = None
        else:
            assert event["item_id"] == open_item["id"]
            deltas += event.get("delta", "")
            if kind.endswith(".done") and kind != "content_part.done":
                assert deltas == event.get("text", event.get("arguments"))
    assert open_item is None
    assert events[-1]["response"]["output"] == done


def texts(output):
    """What the items say, without their ids."""
    return [(item["type"], item["arguments"] if "arguments" in item else item["content"][0]["text"]) for item in output]


@rows("dialect", "harmony", "deepseek")
@rows(
    "kind, output", (2, [("message", "The capital of France is Paris.")]), (3, [("function_call", '{"city": "Paris"}')])
)
def test_streamed_and_whole_answers_are_the_same_and_valid(services, dialect, kind, output):
    service, tokenizer, *_ = services[dialect]
    script(service, tokenizer, services[dialect][kind])
    fields = {"input": "Hi", "tools": [TOOL], "instructions": "Be brief.", "metadata": {"a": "b"}}
    events = checked_stream(service, **fields)
    with service.http() as http:
        whole = http.post("/v1/responses", json={"model": MODEL, **fields}).json()
    Response.model_validate(whole)
    streamed = events[-1]["response"]
    assert texts(streamed["output"]) == texts(whole["output"])
    assert texts(whole["output"])[1:] == output
    assert whole["output"][0]["type"] == "reasoning"
    assert streamed["usage"] == whole["usage"]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 3
    assert whole["usage"]["total_tokens"] == whole["usage"]["input_tokens"] + whole["usage"]["output_tokens"]
    assert {**whole, "id": 0, "output": 0, "created_at": 0, "completed_at": 0} == {
        **streamed,
        "id": 0,
        "output": 0,
        "created_at": 0,
        "completed_at": 0,
    }
    assert (whole["status"], whole["store"], whole["metadata"]) == ("completed", False, {"a": "b"})


@rows("dialect", "harmony", "deepseek")
def test_a_round_trip_hands_back_reasoning_call_and_result(services, dialect):
    service, tokenizer, answer, call = services[dialect]
    script(service, tokenizer, call)
    with service.client() as client:
        conversation = [{"role": "user", "content": "Weather?"}]
        first = client.responses.create(model=MODEL, input=conversation, tools=[TOOL])
        [called] = [item for item in first.output if item.type == "function_call"]
        conversation += [item.model_dump(exclude_none=True) for item in first.output]
        conversation.append({"type": "function_call_output", "call_id": called.call_id, "output": "rain"})
        script(service, tokenizer, answer)
        second = client.responses.create(model=MODEL, input=conversation, tools=[TOOL])
    assert second.output_text == "The capital of France is Paris."
    prompt = tokenizer.decode(service.engine.requests[-1].prompt_ids)
    thought = ["I need the weather."] if dialect == "harmony" else []  # DeepSeek's template drops earlier reasoning
    position = 0
    for part in ("Weather?", *thought, "get_weather", '{"city": "Paris"}', "rain"):
        position = prompt.index(part, position)


def test_text_beside_calls_keeps_its_place_and_several_calls_are_several_items(services):
    service, tokenizer, *_ = services["harmony"]
    script(service, tokenizer, PREAMBLE)
    events = checked_stream(service, input="Hi", tools=[TOOL])
    assert texts(events[-1]["response"]["output"]) == [
        ("message", "I look it up."),
        ("reasoning", "I need the weather."),
        ("function_call", '{"city": "Paris"}'),
        ("function_call", "{}"),
    ]
    events = checked_stream(service, input="Hi", tools=[TOOL], parallel_tool_calls=False)
    assert len(events[-1]["response"]["output"]) == 3
    script(service, tokenizer, ANSWER)
    history = events[-1]["response"]["output"]
    history.append({"type": "function_call_output", "call_id": history[-1]["call_id"], "output": "rain"})
    checked_stream(service, input=[{"role": "user", "content": "Hi"}, *history], tools=[TOOL])
    assert "I look it up." in tokenizer.decode(service.engine.requests[-1].prompt_ids)


def test_the_clients_stream_helper_reads_it(services):
    service, tokenizer, answer, _ = services["harmony"]
    script(service, tokenizer, answer)
    with service.client() as client, client.responses.stream(model=MODEL, input="Hi") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert len(deltas) > 3
    assert "".join(deltas) == final.output_text == "The capital of France is Paris."


def test_logprobs_are_included_on_request(services):
    service, tokenizer, answer, _ = services["harmony"]
    script(service, tokenizer, answer)
    fields = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    events = checked_stream(service, **fields)
    whole = events[-1]["response"]["output"][1]["content"][0]["logprobs"]
    assert [len(entry["top_logprobs"]) for entry in whole] == [2] * len(whole)
    assert b"".join(bytes(entry["bytes"]) for entry in whole) == b"The capital of France is Paris."
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for entries in deltas for entry in entries] == whole
    with service.http() as http:
        body = http.post("/v1/responses", json={"model": MODEL, **fields}).json()
    assert body["output"][1]["content"][0]["logprobs"] == whole


@rows("stream", False, True)
def test_an_answer_that_is_cut_is_incomplete(services, stream):
    service, tokenizer, answer, _ = services["harmony"]
    script(service, tokenizer, answer)
    if stream:
        events = checked_stream(service, input="Hi", max_output_tokens=6)
        assert events[-1]["type"] == "response.incomplete"
        response = events[-1]["response"]
    else:
        with service.http() as http:
            response = http.post("/v1/responses", json={"model": MODEL, "input": "Hi", "max_output_tokens": 6}).json()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [(item["type"], item["status"]) for item in response["output"]] == [("reasoning", "incomplete")]
    assert response["usage"]["output_tokens"] == 6


def test_an_engine_that_fails_after_the_first_token_ends_the_stream_with_failed(services, monkeypatch, tmp_path):
    service, tokenizer, answer, _ = services["harmony"]
    script(service, tokenizer, answer)
    steps = service.engine._steps

    def failing(request):
        failure = EngineOutput(request_id=request.request_id, finish_reason="error", error="broken")
        return [*steps(request)[:9], failure]

    monkeypatch.setattr(service.engine, "_steps", failing)
    last = checked_stream(service, input="Hi")[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "broken"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    with serve(service.engine, tokenizer, response_store=tmp_path / "f") as storing:
        assert checked_stream(storing, input="Hi")[-1]["response"]["store"] is False, "failed answers are not stored"
    with service.client() as client, pytest.raises(openai.InternalServerError):
        client.responses.create(model=MODEL, input="Hi")


@rows(
    "fields, param",
    ({"foo": 1}, "foo"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"n": 2}, "n"),
    ({"background": True}, "background"),
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"stream_options": {}}, "stream_options"),
    ({"reasoning": {"effort": "none"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOL, {**TOOL, "name": "two words"}]}, "tools[1].name"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"input": []}, "input"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[0].call_id"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "abc"}]}, "input[0].encrypted_content"),
)
def test_what_is_not_supported_is_refused_by_name(services, fields, param):
    service = services["harmony"][0]
    with service.http() as http:
        answer = http.post("/v1/responses", json={"model": MODEL, "input": "Hi", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert param in error["message"] or "context length" in error["message"]


def test_what_the_chat_endpoint_would_get_is_what_the_engine_gets(services):
    service, tokenizer, answer, _ = services["harmony"]
    script(service, tokenizer, answer)
    sampling = {"temperature": 0.3, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 5}
    with service.client() as client:
        client.responses.create(
            model=MODEL,
            instructions="Be brief.",
            input=[{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
            reasoning={"effort": "low", "summary": "auto"},
            text={"format": {"type": "text"}},
            tool_choice="none",
            tools=[TOOL],
            max_output_tokens=50,
            temperature=0.3,
            top_p=0.9,
            truncation="disabled",
            user="someone",
            extra_body={"top_k": 7, "min_p": 0.1, "seed": 5},
        )
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        fields = {"tool_choice": "none", "tools": [WEATHER], "reasoning_effort": "low", "max_tokens": 50, **sampling}
        with service.http() as http:
            assert http.post("/v1/chat/completions", json={"messages": messages, **fields}).status_code == 200
    ours, chats = service.engine.requests[-2:]
    assert ours.prompt_ids == chats.prompt_ids
    assert ours.sampling == chats.sampling
    assert ours.sampling.seed == 5


def test_the_document_describes_the_events_and_errors(services):
    service = services["harmony"][0]
    with service.http() as http:
        paths = http.get("/openapi.json").json()["paths"]
    operation, chat = paths["/v1/responses"]["post"], paths["/v1/chat/completions"]["post"]
    assert operation["responses"].keys() == chat["responses"].keys()
    events = operation["responses"]["200"]["content"]["text/event-stream"]["schema"]
    assert events["properties"]["data"]["contentSchema"]["required"] == ["type", "sequence_number"]
    assert {"get", "delete"} == paths["/v1/responses/{response_id}"].keys()
