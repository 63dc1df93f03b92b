"""/v1/chat/completions over real HTTP with the official client: answers, tools, streaming, log-probabilities."""

import json
import re

import pytest

from tests.server.conftest import ANSWER, CALL, MAX_MODEL_LEN, MODEL, WEATHER, wait_until
from tests.tables import rows

USER = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."
THOUGHT = "The user asks for a capital."


@pytest.fixture
def chat(service, harmony):
    """Ask the server; the engine answers with the transcript given."""

    with service.client() as client:

        def ask(transcript=ANSWER, **fields):
            if transcript is not None:
                service.engine.script = lambda _request: harmony(transcript)
            return client.chat.completions.create(**{"model": MODEL, "messages": USER, **fields})

        yield ask


def chunks_of(stream):
    with stream:
        return list(stream)


def merge(chunks, index=0):
    """What a client makes of a stream: content, reasoning, calls, finish reasons, logprob entries."""
    content, reasoning, calls, reasons, entries = "", "", {}, [], []
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index != index:
                continue
            content += choice.delta.content or ""
            extra = choice.delta.model_extra or {}
            assert extra.get("reasoning") == extra.get("reasoning_content")
            reasoning += extra.get("reasoning") or ""
            for part in choice.delta.tool_calls or []:
                if part.id is not None:
                    assert part.index not in calls
                    calls[part.index] = [part.id, part.function.name, ""]
                calls[part.index][2] += part.function.arguments or ""
            if choice.finish_reason is not None:
                reasons.append(choice.finish_reason)
            if choice.logprobs is not None:
                entries += choice.logprobs.content
    return content, reasoning, calls, reasons, entries


def test_answer(chat, harmony):
    answer = chat()
    message = answer.choices[0].message
    assert (message.role, message.content, message.tool_calls) == ("assistant", PARIS, None)
    assert message.reasoning_content == message.reasoning == THOUGHT
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint
    assert answer.usage.completion_tokens == len(harmony(ANSWER))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(harmony(THOUGHT))
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_streamed_answer_is_the_same(chat):
    chunks = chunks_of(chat(stream=True))
    content, reasoning, calls, reasons, _ = merge(chunks)
    assert (content, reasoning, calls, reasons) == (PARIS, THOUGHT, {}, ["stop"])
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_tool_call_is_the_same_streamed(chat):
    answer = chat(CALL, tools=[WEATHER], tool_choice="auto")
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "get_weather", '{"city": "Paris"}')
    assert call.id.startswith("call_")
    assert "<|" not in answer.model_dump_json()
    _, _, calls, reasons, _ = merge(chunks_of(chat(CALL, tools=[WEATHER], stream=True)))
    assert reasons == ["tool_calls"]
    assert [call[1:] for call in calls.values()] == [["get_weather", '{"city": "Paris"}']]


def test_conversation_continues_with_the_message_as_it_came(chat, service, tokenizer):
    message = chat(CALL, tools=[WEATHER]).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    assert chat(messages=[*USER, message, result], tools=[WEATHER]).choices[0].message.content == PARIS
    prompt = tokenizer.decode(service.engine.requests[-1].prompt_ids)
    assert "I need the weather." in prompt
    assert '<|message|>{"city": "Paris"}<|call|>' in prompt
    assert "sunny" in prompt


def test_content_parts_are_joined(chat, service, tokenizer):
    chat(messages=[{"role": "user", "content": [{"type": "text", "text": t} for t in ("one", "two")]}])
    assert "one\ntwo" in tokenizer.decode(service.engine.requests[0].prompt_ids)


@rows("stream", False, True)
def test_tokens_after_the_end_of_turn_are_billed_but_not_read_b01(chat, harmony, stream):
    transcript = ANSWER + "<|start|>user<|message|>junk<|end|>"
    fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = chat(transcript, extra_body={"ignore_eos": True}, **fields)
    if stream:
        chunks = chunks_of(answer)
        assert merge(chunks)[0] == PARIS
        assert chunks[-1].usage.completion_tokens == len(harmony(transcript))
    else:
        assert answer.choices[0].message.content == PARIS
        assert answer.usage.completion_tokens == len(harmony(transcript))


@rows("ignores", False, True)
def test_ends_of_the_turn_can_be_ignored_but_not_the_clients_own_stop_ids(chat, service, ignores):
    chat(extra_body={"ignore_eos": ignores, "stop_token_ids": [1666]})
    sampling = service.engine.requests[-1].sampling
    assert sampling.ignore_eos is ignores
    assert (1666 in sampling.stop_token_ids, len(sampling.stop_token_ids) > 1) == (True, not ignores)


@rows("stream", False, True)
def test_budget_spent_on_thinking_b23(chat, stream):
    answer = chat(max_tokens=6, stream=stream)
    if stream:
        content, reasoning, _, reasons, _ = merge(chunks_of(answer))
    else:
        message, reasons = answer.choices[0].message, [answer.choices[0].finish_reason]
        content, reasoning = message.content or "", message.reasoning
        assert message.content is None
        assert 0 < answer.usage.completion_tokens_details.reasoning_tokens <= answer.usage.completion_tokens == 6
    assert (content, reasons) == ("", ["length"])
    assert reasoning
    assert THOUGHT.startswith(reasoning)


def test_limits_b23(chat, service):
    chat()
    prompt = len(service.engine.requests[-1].prompt_ids)
    assert service.engine.requests[-1].sampling.max_tokens == MAX_MODEL_LEN - prompt
    for fields in ({"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 5}):
        assert chat(**fields).usage.completion_tokens == 5


@rows("options, expected", (None, 0), ({}, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1))
def test_usage_chunk_b19(chat, options, expected):
    fields = {} if options is None else {"stream_options": options}
    chunks = chunks_of(chat(stream=True, **fields))
    with_usage = [chunk for chunk in chunks if chunk.usage is not None]
    assert len(with_usage) == expected
    if expected:
        assert with_usage == chunks[-1:]
        assert chunks[-1].choices == []
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage == chat().usage


@rows("stop", "DEFGHIJ", ["nope", "DEF", "\n\n"], ["D"], ["DEFGHIJKL"])
def test_stop_strings_b17(chat, service, harmony, stop):
    service.engine.forget()
    transcript = "<|channel|>final<|message|>ABCDEFGHIJKLMNOP<|return|>"
    service.engine.script = lambda _request: [[i] for i in harmony(transcript)]
    content, _, _, reasons, _ = merge(chunks_of(chat(None, stream=True, stop=stop)))
    answer = chat(None, stop=stop)
    assert content == answer.choices[0].message.content == "ABC"
    assert reasons == [answer.choices[0].finish_reason] == ["stop"]
    wait_until(lambda: len(service.engine.aborted) == 2)


@rows("step", 1, 3, 100)
def test_logprobs_are_aligned_whatever_the_chunks_b16(chat, service, harmony, tokenizer, step):
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    ids = harmony(f"{thought}<|channel|>final<|message|>naïve 日本 Paris<|return|>")
    service.engine.script = lambda _request: [ids[i : i + step] for i in range(0, len(ids), step)]
    fields = {"logprobs": True, "top_logprobs": 2, "stop": "zzz"}
    entries = chat(None, **fields).choices[0].logprobs.content
    assert merge(chunks_of(chat(None, stream=True, **fields)))[4] == entries
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == "naïve 日本 Paris"
    shown = [i for i in ids if tokenizer.token_bytes(i) in [bytes(entry.bytes) for entry in entries]]
    for entry in entries:
        token_id = round(-entry.logprob * 1000)
        assert token_id in shown
        assert tokenizer.token_bytes(token_id) == bytes(entry.bytes)
        assert [round(-top.logprob * 1000) for top in entry.top_logprobs] == [token_id, token_id + 1]


def test_no_logprobs_unless_asked_for(chat):
    assert chat().choices[0].logprobs is None
    assert chat(logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_several_choices(chat, service, harmony):
    texts = ["one", "two", "three"]
    service.engine.script = lambda r: harmony(f"<|channel|>final<|message|>{texts[int(r.request_id[-1])]}<|return|>")
    answer = chat(None, n=3)
    assert [choice.message.content for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    chunks = chunks_of(chat(None, n=3, stream=True))
    assert [merge(chunks, index)[0] for index in range(3)] == texts
    assert answer.usage.prompt_tokens == len(service.engine.requests[0].prompt_ids)


def test_sampling_reaches_the_engine(chat, service, tokenizer):
    chat(
        temperature=0.5,
        top_p=0.9,
        seed=7,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        logit_bias={"5": 3},
        extra_body={"top_k": 4, "min_p": 0.1, "stop_token_ids": [9], "min_tokens": 2, "repetition_penalty": 1.1},
    )
    sampling = service.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 4, 0.1)
    assert (sampling.seed, sampling.presence_penalty, sampling.frequency_penalty) == (7, 0.1, -0.2)
    assert (sampling.logit_bias, sampling.min_tokens, sampling.repetition_penalty) == ({5: 3.0}, 2, 1.1)
    assert {9, tokenizer.special_tokens["<|return|>"], tokenizer.special_tokens["<|call|>"]} <= set(
        sampling.stop_token_ids
    )


def test_hints_are_accepted_and_the_model_may_be_left_out(chat, service, harmony):
    hints = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s"}
    assert chat(**hints).choices[0].message.content == PARIS
    service.engine.script = lambda _request: harmony(ANSWER)
    with service.http() as http:
        response = http.post("/v1/chat/completions", json={"messages": USER})
    assert response.json()["model"] == MODEL


def test_a_stream_on_the_wire_is_events_that_proxies_do_not_buffer(service, harmony):
    service.engine.script = lambda _request: harmony(ANSWER)
    with service.http() as http:
        response = http.post("/v1/chat/completions", json={"messages": USER, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events[:-2])
    service.engine.script = lambda _request: harmony(ANSWER)
    with service.http() as http:
        headers = http.post("/v1/chat/completions", json={"messages": USER, "stream": True}).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")
    assert "content-length" not in headers


def test_cached_tokens_are_reported(chat, service):
    service.engine.last = lambda _request, _num: {"num_cached_tokens": 16}
    assert chat().usage.prompt_tokens_details.cached_tokens == 16


@rows("stream", False, True)
def test_engine_error_before_the_first_token_has_a_status(service, stream):
    service.engine.last = lambda _request, _num: {"finish_reason": "error", "error": "no room", "error_param": "n"}
    with service.http() as http:
        response = http.post("/v1/chat/completions", json={"messages": USER, "stream": stream})
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "no room",
        "type": "invalid_request_error",
        "param": "n",
        "code": None,
    }


def test_full_queue_is_429_with_retry_after(service):
    service.engine.last = lambda _request, _num: {"finish_reason": "error", "error": "full", "overloaded": True}
    with service.http() as http:
        response = http.post("/v1/chat/completions", json={"messages": USER})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["type"] == "rate_limit_error"


def test_engine_error_in_a_stream_is_an_event(service, harmony):
    service.engine.script = lambda _request: [[i] for i in harmony(ANSWER)]
    service.engine.last = lambda _request, _num: {"finish_reason": "error", "error": "the engine has stopped"}
    with service.http() as http:
        response = http.post("/v1/chat/completions", json={"messages": USER, "stream": True})
    assert response.status_code == 200
    last = response.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the engine has stopped"


@rows("sent", b"\xe9", b"\xc3\xa9", b"a" * 129, b"a b", b"")
def test_a_request_id_that_cannot_be_sent_back_as_it_came_is_replaced(service, sent):
    """One of Latin-1 letters came back in UTF-8."""
    with service.http() as http:
        given = http.get("/version", headers={"x-request-id": sent}).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", given)


def test_crash_shows_nothing_of_the_inside(service):
    def crash(_request):
        raise RuntimeError("secret detail")

    service.engine.script = crash
    with service.http() as http:
        response = http.post("/v1/chat/completions", json={"messages": USER}, headers={"x-request-id": "my-id"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "my-id"
    assert "my-id" in response.json()["error"]["message"]
    assert "secret" not in response.text
