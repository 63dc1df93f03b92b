"""llama-index: an answer, a stream, a completion, a tool and a structured answer."""

import json
import sys
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL = sys.argv[1]  # such as http://127.0.0.1:8000
QUESTION = "What is the capital of France?"


def get_weather(city: str) -> dict:
    """Weather of a city"""
    return {"result": 18 if city == "Paris" else 0}


class Capital(BaseModel):
    """A city and whether it is a capital."""

    city: Literal["Paris", "Rome"]
    is_capital: bool


llm = OpenAILike(
    model="tiny-gpt-oss",
    api_base=f"{URL}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    context_window=4096,
)
ask = [ChatMessage(QUESTION)]
answer = llm.chat(ask)
deltas = [part.delta for part in llm.stream_chat(ask)]
tool = FunctionTool.from_defaults(get_weather)
used_tool = llm.predict_and_call([tool], "What is the weather in Paris?")
structured = llm.structured_predict(Capital, PromptTemplate(QUESTION))
told = {
    "answer": answer.message.content,
    "streamed": "".join(deltas),
    "used_tool": used_tool.response,
    "structured": structured.model_dump(),
}
print(json.dumps(told))
