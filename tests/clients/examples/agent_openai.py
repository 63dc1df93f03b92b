"""openai, an agent over streamed chat: two tools, several questions in one conversation.

`pydantic_function_tool` makes strict tools: their arguments always fit the class, whatever the model believes.
"""

import json
import sys

import openai
from pydantic import BaseModel

URL = sys.argv[1]  # such as http://127.0.0.1:8000
MAX_CALLS = 5  # before the agent gives up on a question


class GetWeather(BaseModel):
    """Weather of a city"""

    city: str

    def result(self) -> int:
        return 18 if self.city == "Paris" else 0


class GetPopulation(BaseModel):
    """Population of a country"""

    country: str

    def result(self) -> int:
        return 68 if self.country == "France" else 0


TOOLS = [
    openai.pydantic_function_tool(GetWeather, name="get_weather"),
    openai.pydantic_function_tool(GetPopulation, name="get_population"),
]

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
messages = []


def ask(question: str) -> str:
    """The agent's answer; the conversation grows by all that was said."""
    messages.append({"role": "user", "content": question})
    for _ in range(MAX_CALLS):
        with client.chat.completions.stream(model="tiny-gpt-oss", messages=messages, tools=TOOLS) as stream:
            for event in stream:
                if event.type == "content.delta":
                    print(event.delta, end="", file=sys.stderr)
            said = stream.get_final_completion().choices[0].message
        messages.append(said)  # with its reasoning, which the model may need for the next step
        if not said.tool_calls:
            return said.content
        for call in said.tool_calls:
            result = {"result": call.function.parsed_arguments.result()}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    raise RuntimeError(f"no answer after {MAX_CALLS} calls")


questions = ["What is the weather in Paris?", "What is the population of France?", "What is the capital of Italy?"]
print(json.dumps([ask(question) for question in questions]))
