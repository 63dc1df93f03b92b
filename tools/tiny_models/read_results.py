"""How often a bundled model of GPT-OSS reads a tool's result behind a call that the client sent back without reasoning.

    python -m tools.tiny_models.read_results --base-url http://127.0.0.1:8000

Most clients send calls back so; `evals tiny` has no such conversations. Prints what was not read, then the number.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from evals.client import add_server_arguments, make_client

Ask = Callable[[dict[str, Any]], str | None]
_CITIES = ("Paris", "Rome", "Berlin", "Madrid", "Oslo", "Vienna", "Cairo", "Lima", "Tokyo", "Athens")
_FUNCTIONS = (
    ("get_weather", "Weather of a city", "What is the weather in {}?", "city"),
    ("get_temperature", "Get the temperature", "temperature in {} please", "location"),
    ("look_up", "", "look up {}", "name"),
    ("find_hotel", "Find a hotel in a city", "Find me a hotel in {}", "city"),
)


def conversations() -> list[tuple[dict[str, Any], str]]:
    """Bodies of requests, and the answer that each result calls for."""
    found = []
    for (name, text, question, field), (index, city) in itertools.product(_FUNCTIONS, enumerate(_CITIES)):
        arguments, number = json.dumps({field: city}), 18 + index
        parameters = {"type": "object", "properties": {field: {"type": "string"}}, "required": [field]}
        call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
        for result, answer in (
            (json.dumps({"result": number}), f"The result is {number}."),
            (json.dumps({"temperature": number, "unit": "C"}), f"temperature: {number}, unit: C."),
            (str(number), f"The result is {number}."),
        ):
            messages = [
                {"role": "user", "content": question.format(city)},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": result},
            ]
            function = {"name": name, "description": text, "parameters": parameters}
            tools = [{"type": "function", "function": function}]
            found.append(({"messages": messages, "tools": tools, "temperature": 0, "max_tokens": 60}, answer))
    return found


def misread(ask: Ask, concurrency: int) -> list[str]:
    """A line for each result that the answer of `ask` does not give."""
    bodies, wanted = zip(*conversations(), strict=True)
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(ask, bodies))
    return [
        f"{body['messages'][-1]['content']}: wanted {answer!r}, got {got!r}"
        for body, answer, got in zip(bodies, wanted, answers, strict=True)
        if got != answer
    ]


def main() -> None:
    """Ask the server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_server_arguments(parser)
    args = parser.parse_args()
    client = make_client(args, None)

    def ask(body: dict[str, Any]) -> str | None:
        reply = client.get("/chat/completions", {**body, "model": client.model})
        content: str | None = reply["choices"][0]["message"]["content"]
        return content

    wrong = misread(ask, args.concurrency)
    print(*wrong, sep="\n")
    print(f"{len(conversations()) - len(wrong)} of {len(conversations())} results were read")


if __name__ == "__main__":
    main()
