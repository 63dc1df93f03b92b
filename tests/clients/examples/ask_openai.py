"""openai, chat: an answer, the stream helper, an answer parsed into a class, and a call parsed into a class."""

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel

URL = sys.argv[1]  # such as http://127.0.0.1:8000
MODEL = "tiny-gpt-oss"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class Capital(BaseModel):
    """A city and whether it is a capital."""

    city: Literal["Paris", "Rome"]
    is_capital: bool


class GetWeather(BaseModel):
    """Weather of a city"""

    city: str


client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
chat = client.chat.completions
answer = chat.create(model=MODEL, messages=QUESTION)
with chat.stream(model=MODEL, messages=QUESTION) as stream:
    deltas = [event.delta for event in stream if event.type == "content.delta"]
parsed = chat.parse(model=MODEL, messages=QUESTION, response_format=Capital)
called = chat.parse(
    model=MODEL,
    messages=[{"role": "user", "content": "What is the weather in Paris?"}],
    tools=[openai.pydantic_function_tool(GetWeather, name="get_weather")],
)
told = {
    "answer": answer.choices[0].message.content,
    "streamed": "".join(deltas),
    "parsed": parsed.choices[0].message.parsed.model_dump(),
    "called": called.choices[0].message.tool_calls[0].function.parsed_arguments.model_dump(),
}
print(json.dumps(told))
