"""Reads the answers of chat, responses and messages, whole or streamed, into one record, so that they can be compared.

Each API has a class: where its questions go, how a question is put, and what its two kinds of answers say. Readers of
streams trust nothing: an event of another kind, out of order or twice fails.
"""

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx2
import orjson

from tests.server.conftest import MODEL


@dataclass
class Said:
    """What one choice of an answer says. Arguments of calls are parsed."""

    reasoning: str = ""
    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    finish: str | None = None  # in chat's words
    logprobs: list[Any] = field(default_factory=list)


@dataclass
class Answer:
    """The choices of an answer, and its tokens: of the prompt, generated, and among these of the reasoning."""

    choices: list[Said]
    usage: tuple[int, int, int]


class Chat:
    """POST /v1/chat/completions."""

    path = "/v1/chat/completions"
    stream_fields: ClassVar = {"stream": True, "stream_options": {"include_usage": True}}

    def question(self, text):
        return {"messages": [{"role": "user", "content": text}]}

    def tools(self, functions):
        return [{"type": "function", "function": function} for function in functions]

    def whole(self, body):
        choices = []
        for index, choice in enumerate(body["choices"]):
            assert choice["index"] == index
            message = choice["message"]
            assert message["reasoning"] == message["reasoning_content"]
            calls = [_chat_call(call["function"]) for call in message.get("tool_calls", ())]
            logprobs = choice["logprobs"]["content"] if choice["logprobs"] else []
            choices.append(
                Said(message["reasoning"] or "", message["content"] or "", calls, choice["finish_reason"], logprobs)
            )
        return Answer(choices, self._usage(body["usage"]))

    def streamed(self, events):
        *chunks, last = (event for _, event in events)
        assert last["choices"] == []
        choices, calls = {}, {}
        for chunk in chunks:
            [choice] = chunk["choices"]
            said, delta = choices.get(choice["index"]), choice["delta"]
            if said is None:
                assert delta["role"] == "assistant"
                said = choices[choice["index"]] = Said()
            assert said.finish is None, "nothing follows the finish reason"
            assert delta.get("reasoning") == delta.get("reasoning_content")
            said.reasoning += delta.get("reasoning") or ""
            said.text += delta.get("content") or ""
            said.logprobs += choice["logprobs"]["content"] if choice["logprobs"] else []
            said.finish = choice["finish_reason"]
            own = calls.setdefault(choice["index"], [])
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(own)
                    own.append({"name": call["function"]["name"], "arguments": ""})
                own[call["index"]]["arguments"] += call["function"]["arguments"]
        for index, own in calls.items():
            choices[index].calls = [_chat_call(call) for call in own]
        return Answer([choices[index] for index in range(len(choices))], self._usage(last["usage"]))

    def _usage(self, usage):
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        return usage["prompt_tokens"], usage["completion_tokens"], reasoning


class Responses:
    """POST /v1/responses."""

    path = "/v1/responses"
    stream_fields: ClassVar = {"stream": True}

    def question(self, text):
        return {"input": text}

    def tools(self, functions):
        return [{"type": "function", **function} for function in functions]

    def whole(self, body):
        said = Said()
        for item in body["output"]:
            if item["type"] == "function_call":
                said.calls.append(_chat_call(item))
                continue
            [part] = item["content"]
            if item["type"] == "reasoning":
                said.reasoning += part["text"]
            else:
                said.text += part["text"]
                said.logprobs += part["logprobs"]
        return self._answer(said, body)

    def streamed(self, events):
        """From the deltas alone; the last event brings what is no delta, and must say the same as they do."""
        said, arguments, names = Said(), [], []
        for number, (name, event) in enumerate(events):
            assert (name, number) == (event["type"], event["sequence_number"])
            match event["type"].removeprefix("response."):
                case "output_item.added" if event["item"]["type"] == "function_call":
                    names.append(event["item"]["name"])
                    arguments.append("")
                case "reasoning_text.delta":
                    said.reasoning += event["delta"]
                case "output_text.delta":
                    said.text += event["delta"]
                    said.logprobs += event["logprobs"]
                case "function_call_arguments.delta":
                    arguments[-1] += event["delta"]
        said.calls = [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]
        last = events[-1][1]
        assert last["type"] == f"response.{last['response']['status']}"
        answer = self._answer(said, last["response"])
        assert answer == self.whole(last["response"])
        return answer

    def _answer(self, said, body):
        usage, finish = body["usage"], {"completed": "stop", "incomplete": "length"}[body["status"]]
        said.finish = "tool_calls" if said.calls and finish == "stop" else finish
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        reasoning = usage["output_tokens_details"]["reasoning_tokens"]
        return Answer([said], (usage["input_tokens"], usage["output_tokens"], reasoning))


class Messages:
    """POST /v1/messages."""

    path = "/v1/messages"
    stream_fields: ClassVar = {"stream": True}

    def question(self, text):
        return {"messages": [{"role": "user", "content": text}], "max_tokens": 500}

    def tools(self, functions):
        renamed = {"name": "name", "parameters": "input_schema", "strict": "strict"}
        return [{renamed[key]: value for key, value in each.items() if key in renamed} for each in functions]

    def whole(self, body):
        said = Said()
        for block in body["content"]:
            match block["type"]:
                case "thinking":
                    assert block["signature"]
                    said.reasoning += block["thinking"]
                case "text":
                    said.text += block["text"]
                case "tool_use":
                    said.calls.append((block["name"], block["input"]))
        return self._answer(said, body, body["usage"])

    def streamed(self, events):
        blocks, is_open = [], False
        assert [name for name, _ in events] == [event["type"] for _, event in events]
        (_, start), *middle, (_, delta), (_, stop) = events
        assert (start["type"], delta["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
        for name, event in middle:
            if name == "ping":
                continue
            assert event["index"] == len(blocks) - (name != "content_block_start")
            assert is_open == (name != "content_block_start")
            if name == "content_block_start":
                blocks.append({**event["content_block"], "json": ""})
            elif name == "content_block_delta":
                kind, (key, value) = event["delta"].pop("type"), *event["delta"].items()
                blocks[-1]["json" if kind == "input_json_delta" else key] += value
            is_open = name != "content_block_stop"
        assert not is_open
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["json"])
        return self.whole({"content": blocks, **delta["delta"], "usage": delta["usage"]})

    def _answer(self, said, body, usage):
        reasons = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
        said.finish = reasons[body["stop_reason"]]
        assert (body["stop_reason"] == "stop_sequence") == (body["stop_sequence"] is not None)
        reasoning = usage["output_tokens_details"]["thinking_tokens"]
        prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
        return Answer([said], (prompt, usage["output_tokens"], reasoning))


APIS = {"chat": Chat(), "responses": Responses(), "messages": Messages()}


def ask(http: httpx2.Client, api: Any, fields: dict[str, Any], *, model: str = MODEL) -> Answer:
    """The whole answer."""
    return api.whole(post(http, api, {"model": model, **fields}).json())


def ask_streamed(http: httpx2.Client, api: Any, fields: dict[str, Any], *, model: str = MODEL) -> Answer:
    """The streamed answer."""
    return api.streamed(_events(api, post(http, api, {"model": model, **fields, **api.stream_fields}).text))


def post(http: httpx2.Client, api: Any, fields: dict[str, Any]) -> httpx2.Response:
    """A request that must succeed."""
    response = http.post(api.path, json=fields)
    assert response.status_code == 200, response.text
    return response


def _events(api: Any, text: str) -> list[tuple[str | None, Any]]:
    """The names and the JSON of all events."""
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    if isinstance(api, Chat):
        assert blocks.pop() == "data: [DONE]"
    events = []
    for block in blocks:
        *name, data = block.split("\n")
        events.append((name[0].removeprefix("event: ") if name else None, orjson.loads(data.removeprefix("data: "))))
    return events


def _chat_call(function: dict[str, Any]) -> tuple[str, Any]:
    return function["name"], json.loads(function["arguments"])
