"""litellm as the providers openai and hosted_vllm: an answer, a stream, a class, and a call with the turn after it."""

import json
import sys
from typing import Literal

import litellm
from pydantic import BaseModel

URL = sys.argv[1]  # such as http://127.0.0.1:8000
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Capital(BaseModel):
    """A city and whether it is a capital."""

    city: Literal["Paris", "Rome"]
    is_capital: bool


told = {}
for provider in ("openai", "hosted_vllm"):
    to = {"model": f"{provider}/tiny-gpt-oss", "api_base": f"{URL}/v1", "api_key": "none"}
    whole = litellm.completion(messages=QUESTION, **to)
    stream = litellm.completion(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **to)
    chunks = list(stream)
    parsed = litellm.completion(messages=QUESTION, response_format=Capital, **to).choices[0].message.content
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    called = litellm.completion(messages=messages, tools=[WEATHER], tool_choice="auto", **to).choices[0].message
    [call] = called.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"result": 18}'}
    after = litellm.completion(messages=[*messages, called.model_dump(), result], tools=[WEATHER], **to)
    told[provider] = {
        "answer": whole.choices[0].message.content,
        "reasoning": whole.choices[0].message.reasoning_content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "tokens": [whole.usage.completion_tokens, chunks[-1].usage.completion_tokens],
        "parsed": Capital.model_validate_json(parsed).model_dump(),
        "called": json.loads(call.function.arguments),
        "after": after.choices[0].message.content,
    }
print(json.dumps(told))
