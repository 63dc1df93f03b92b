"""pydantic-ai: tools, answers as a call of an output tool and bound by a schema, over chat and over responses."""

import json
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL = sys.argv[1]  # such as http://127.0.0.1:8000
QUESTION = "What is the capital of France?"


def get_weather(city: str) -> dict:
    """Weather of a city"""
    return {"result": 18 if city == "Paris" else 0}


class Capital(BaseModel):
    """A city and whether it is a capital."""

    city: Literal["Paris", "Rome"]
    is_capital: bool


provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
told = {}
for name, model_class in {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}.items():
    model = model_class("tiny-gpt-oss", provider=provider)
    told[name] = {
        "used_tool": Agent(model, tools=[get_weather]).run_sync("What is the weather in Paris?").output,
        "tool_output": Agent(model, output_type=ToolOutput(Capital)).run_sync(QUESTION).output.model_dump(),
        "native_output": Agent(model, output_type=NativeOutput(Capital)).run_sync(QUESTION).output.model_dump(),
    }
print(json.dumps(told))
