"""instructor: an answer as a call, as JSON of a schema, and as any JSON object."""

import json
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

URL = sys.argv[1]  # such as http://127.0.0.1:8000
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class Capital(BaseModel):
    """A city and whether it is a capital."""

    city: Literal["Paris", "Rome"]
    is_capital: bool


class Guess(BaseModel):
    """Mode.JSON promises an object and not its fields, so none is required."""

    city: str | None = None


service = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
told = {}
for mode, kind in {"TOOLS": Capital, "JSON_SCHEMA": Capital, "JSON": Guess}.items():
    client = instructor.from_openai(service, mode=instructor.Mode[mode])
    answer = client.create(model="tiny-gpt-oss", messages=QUESTION, response_model=kind, max_tokens=500)
    told[mode] = answer.model_dump()
print(json.dumps(told))
