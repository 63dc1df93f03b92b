"""Asks through langchain-openai; prints what it got as one JSON object."""

import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

QUESTION = "What is the capital of France?"


@tool
def get_weather(city: str) -> dict:
    """Weather of a city"""
    return {"result": 18 if city == "Paris" else 0}


def main(url: str) -> None:
    """Every call that the tests look at."""
    to = {"base_url": f"{url}/v1", "api_key": "none", "model": "tiny-gpt-oss"}
    chat = ChatOpenAI(stream_usage=True, **to)
    whole = chat.invoke(QUESTION)
    chunks = list(chat.stream(QUESTION))
    asked = HumanMessage("What is the weather in Paris?")
    called = chat.bind_tools([get_weather]).invoke([asked])
    [call] = called.tool_calls
    result = ToolMessage(json.dumps(get_weather.invoke(call["args"])), tool_call_id=call["id"])
    after = chat.bind_tools([get_weather]).invoke([asked, called, result])
    told = {
        "content": whole.content,
        "streamed": "".join(chunk.content for chunk in chunks),
        "output_tokens": [
            whole.usage_metadata["output_tokens"],
            *(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata),
        ],
        "call": [call["name"], call["args"]],
        "after": after.content,
        "completion": OpenAI(max_tokens=4, temperature=0, **to).invoke("The capital of France is"),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
