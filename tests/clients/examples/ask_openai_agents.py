"""openai-agents with its default model class, which speaks the Responses API: tools, a handoff, a structured answer."""

import json
import sys
from typing import Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    handoff,
    set_default_openai_client,
    set_tracing_disabled,
)
from agents.extensions.handoff_filters import remove_all_tools
from pydantic import BaseModel

URL = sys.argv[1]  # such as http://127.0.0.1:8000
MODEL = "tiny-gpt-oss"


@function_tool
def get_weather(city: str) -> str:
    """Weather of a city"""
    return json.dumps({"result": 18 if city == "Paris" else 0})


class Capital(BaseModel):
    """A city and whether it is a capital."""

    city: Literal["Paris", "Rome"]
    is_capital: bool


set_default_openai_client(openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none"))
set_tracing_disabled(True)  # traces would go to OpenAI

weather = Agent("weather", model=MODEL, tools=[get_weather])
geographer = Agent("geographer", model=MODEL, output_type=Capital)
front_desk = Agent(
    "front desk",
    model=MODEL,
    handoffs=[handoff(geographer, input_filter=remove_all_tools)],
    model_settings=ModelSettings(tool_choice="required"),
)
used_tool = Runner.run_sync(weather, "What is the weather in Paris?")
structured = Runner.run_sync(geographer, "What is the capital of France?")
handed_off = Runner.run_sync(front_desk, "What is the capital of France?")
told = {
    "used_tool": used_tool.final_output,
    "structured": structured.final_output.model_dump(),
    "handed_off": [handed_off.last_agent.name, handed_off.final_output.model_dump()],
}
print(json.dumps(told))
