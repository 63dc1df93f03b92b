"""langchain-openai: an answer, a stream, tools, a forced call, and the three ways to a structured answer."""

import json
import sys
from typing import Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

URL = sys.argv[1]  # such as http://127.0.0.1:8000
SERVICE = {"base_url": f"{URL}/v1", "api_key": "none", "model": "tiny-gpt-oss"}
QUESTION = "What is the capital of France?"


@tool
def get_weather(city: str) -> dict:
    """Weather of a city"""
    return {"result": 18 if city == "Paris" else 0}


class Capital(BaseModel):
    """A city and whether it is a capital."""

    city: Literal["Paris", "Rome"]
    is_capital: bool


chat = ChatOpenAI(stream_usage=True, **SERVICE)
whole = chat.invoke(QUESTION)
chunks = list(chat.stream(QUESTION))
weather = HumanMessage("What is the weather in Paris?")
called = chat.bind_tools([get_weather]).invoke([weather])
after = chat.bind_tools([get_weather]).invoke([weather, called, get_weather.invoke(called.tool_calls[0])])
forced = chat.bind_tools([get_weather], tool_choice="any").invoke(QUESTION)
structured = {
    method: chat.with_structured_output(Capital, method=method).invoke(QUESTION).model_dump()
    for method in ("json_schema", "function_calling")
}
any_object = chat.with_structured_output(None, method="json_mode").invoke(QUESTION)  # a dict of any shape
told = {
    "answer": whole.content,
    "streamed": "".join(chunk.content for chunk in chunks),
    "tokens": [
        whole.usage_metadata["output_tokens"],
        *(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata),
    ],
    "called": called.tool_calls[0]["args"],
    "after": after.content,
    "forced": [call["name"] for call in forced.tool_calls],
    **structured,
    "json_mode": any_object,
    "completion": OpenAI(max_tokens=4, temperature=0, **SERVICE).invoke("The capital of France is"),
}
print(json.dumps(told))
