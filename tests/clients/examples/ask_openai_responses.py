"""openai, responses: an answer, a stream, a parsed answer, and a call with the turn after it."""

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel

URL = sys.argv[1]  # such as http://127.0.0.1:8000
MODEL = "tiny-gpt-oss"
QUESTION = "What is the capital of France?"


class Capital(BaseModel):
    """A city and whether it is a capital."""

    city: Literal["Paris", "Rome"]
    is_capital: bool


class GetWeather(BaseModel):
    """Weather of a city"""

    city: str


client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
answer = client.responses.create(model=MODEL, input=QUESTION)
with client.responses.stream(model=MODEL, input=QUESTION) as stream:
    deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
parsed = client.responses.parse(model=MODEL, input=QUESTION, text_format=Capital)
tool = {"type": "function", **openai.pydantic_function_tool(GetWeather, name="get_weather")["function"]}
conversation = [{"role": "user", "content": "What is the weather in Paris?"}]
asked = client.responses.parse(model=MODEL, input=conversation, tools=[tool])
[call] = [item for item in asked.output if item.type == "function_call"]
result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"result": 18}'}
after = client.responses.create(model=MODEL, input=[*conversation, *asked.output, result], tools=[tool])
told = {
    "answer": answer.output_text,
    "streamed": "".join(deltas),
    "parsed": parsed.output_parsed.model_dump(),
    "called": json.loads(call.arguments),
    "after": after.output_text,
}
print(json.dumps(told))
