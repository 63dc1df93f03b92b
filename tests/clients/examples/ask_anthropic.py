"""anthropic: a message, a stream, an answer parsed into a class, and a call with the turn after it."""

import json
import sys
from typing import Literal

import anthropic
from pydantic import BaseModel

URL = sys.argv[1]  # such as http://127.0.0.1:8000, without /v1
ASK = {"model": "tiny-gpt-oss", "max_tokens": 500}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


class Capital(BaseModel):
    """A city and whether it is a capital."""

    city: Literal["Paris", "Rome"]
    is_capital: bool


client = anthropic.Anthropic(base_url=URL, api_key="none")
answer = client.messages.create(messages=QUESTION, **ASK)
with client.messages.stream(messages=QUESTION, **ASK) as stream:
    deltas = list(stream.text_stream)
parsed = client.messages.parse(messages=QUESTION, output_format=Capital, **ASK)
conversation = [{"role": "user", "content": "What is the weather in Paris?"}]
asked = client.messages.create(messages=conversation, tools=[WEATHER], **ASK)
[call] = [block for block in asked.content if block.type == "tool_use"]
result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"result": 18}'}
conversation += [{"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
after = client.messages.create(messages=conversation, tools=[WEATHER], **ASK)
told = {
    "answer": answer.content[-1].text,
    "streamed": "".join(deltas),
    "parsed": parsed.parsed_output.model_dump(),
    "called": call.input,
    "after": after.content[-1].text,
}
print(json.dumps(told))
