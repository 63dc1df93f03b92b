"""openai, an agent over responses: the service keeps the conversation, so each request has only what is new.

The service needs `--response-store FILE`. Instructions are not kept: send them each time.
"""

import json
import sys

import openai

URL = sys.argv[1]  # such as http://127.0.0.1:8000
MAX_CALLS = 5  # before the agent gives up on a question
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")


class Agent:
    """Answers questions of one conversation; `last_id` is that of the last response."""

    last_id = None

    def ask(self, question):
        """The agent's answer, given all that was asked before."""
        new_items = [{"role": "user", "content": question}]
        for _ in range(MAX_CALLS):
            response = client.responses.create(
                model="tiny-gpt-oss", input=new_items, tools=[WEATHER], previous_response_id=self.last_id
            )
            self.last_id = response.id
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            new_items = []
            for call in calls:
                result = {"result": 18 if json.loads(call.arguments)["city"] == "Paris" else 0}
                new_items.append(
                    {"type": "function_call_output", "call_id": call.call_id, "output": json.dumps(result)}
                )
        raise RuntimeError(f"no answer after {MAX_CALLS} calls")


agent = Agent()
print(json.dumps([agent.ask("What is the weather in Paris?"), agent.ask("What is the capital of Italy?")]))
