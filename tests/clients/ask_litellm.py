"""Asks through litellm, as the providers openai and hosted_vllm; prints what it got as one JSON object."""

import json
import sys

import litellm

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def main(url: str) -> None:
    """Every call that the tests look at."""
    print(json.dumps({provider: answers(f"{provider}/tiny-gpt-oss", url) for provider in ("openai", "hosted_vllm")}))


def answers(model: str, url: str) -> dict:
    """Chat, stream, tool call, and the turn after it with the message as litellm holds it."""
    to = {"model": model, "api_base": f"{url}/v1", "api_key": "none"}
    whole = litellm.completion(messages=QUESTION, **to)
    stream = litellm.completion(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **to)
    chunks = list(stream)
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    called = litellm.completion(messages=messages, tools=[WEATHER], tool_choice="auto", **to).choices[0].message
    [call] = called.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"result": 18}'}
    after = litellm.completion(messages=[*messages, called.model_dump(), result], tools=[WEATHER], **to)
    return {
        "content": whole.choices[0].message.content,
        "reasoning": whole.choices[0].message.reasoning_content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "completion_tokens": [whole.usage.completion_tokens, chunks[-1].usage.completion_tokens],
        "call": [call.function.name, json.loads(call.function.arguments)],
        "after": after.choices[0].message.content,
    }


if __name__ == "__main__":
    main(sys.argv[1])
