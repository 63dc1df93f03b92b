"""Parameters beyond OpenAI's, over real HTTP: token ids, listed log-probabilities, continued messages, budgets."""

import json

import openai
import pytest

from server.parsers.thinking import thinking_budget
from tests.server.conftest import ANSWER, CALL, MODEL, WEATHER
from tests.server.test_deepseek_parser import MARKERS
from tests.tables import rows

USER = [{"role": "user", "content": "What is the capital of France?"}]
SILENT, BEGUN = ([*USER, {"role": "assistant", "content": text}] for text in ("", "Paris"))
PARIS = "The capital of France is Paris."


@pytest.fixture
def post(service, harmony):
    """Send a body; the engine answers with the transcript given. Returns the JSON, or the events of a stream."""
    with service.http() as http:

        def send(path, transcript=ANSWER, **fields):
            service.engine.script = lambda _request: harmony(transcript)
            response = http.post(path, json=fields)
            assert response.status_code == 200, response.text
            if not fields.get("stream"):
                return response.json()
            lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
            assert lines.pop() == "[DONE]"
            return [json.loads(line) for line in lines]

        yield send


@pytest.fixture
def chat(post):
    return lambda transcript=ANSWER, **fields: post("/v1/chat/completions", transcript, **{"messages": USER, **fields})


def gathered(chunks, index=0):
    """Token ids of a stream's choice, and where its prompt's ids came."""
    entries = [entry for chunk in chunks for entry in chunk["choices"] if entry["index"] == index]
    places = [place["prompt_token_ids"] for place in (*chunks, *entries) if "prompt_token_ids" in place]
    return [token_id for entry in entries for token_id in entry.get("token_ids", ())], places


@rows("transcript", ANSWER, CALL)
def test_chat_returns_token_ids(transcript, chat, service, harmony):
    fields = {"return_token_ids": True, "n": 2, "tools": [WEATHER]}
    whole, chunks = chat(transcript, **fields), chat(transcript, **fields, stream=True)
    prompt_ids = service.engine.requests[-1].prompt_ids
    assert whole["prompt_token_ids"] == prompt_ids
    for index in range(2):
        assert whole["choices"][index]["token_ids"] == harmony(transcript)
        assert gathered(chunks, index) == (harmony(transcript), [prompt_ids])
    assert "prompt_token_ids" in chunks[0]
    assert all("token_ids" in entry for chunk in chunks for entry in chunk["choices"] if entry["finish_reason"])
    assert "token_ids" not in str(chat(transcript, stream=True))


@rows("stop", "Par", " Par", " Paris", " Parisian")  # the first text comes at once, never, or at the end
def test_completions_return_token_ids(stop, post, service, harmony):
    fields = {"prompt": ["Hello", harmony("Good bye")], "return_token_ids": True, "stop": stop}
    whole, chunks = (
        post("/v1/completions", " Paris", **fields),
        post("/v1/completions", " Paris", **fields, stream=True),
    )
    assert "prompt_token_ids" not in whole
    for index, prompt in enumerate(("Hello", "Good bye")):
        choice = whole["choices"][index]
        assert choice["prompt_token_ids"] == harmony(prompt)
        assert choice["token_ids"] == harmony(" Paris")[: len(choice["token_ids"])]
        assert gathered(chunks, index) == (choice["token_ids"], [harmony(prompt)])
    assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]


def test_completions_score_their_prompts(post, harmony):
    """Each token with the best ones in its place; fake log-probabilities tell which token they belong to."""
    [_, second, *_] = ids = harmony("Hello there")
    fields = {"prompt": "Hello there", "prompt_logprobs": 1, "logprobs": 0, "echo": True}
    [choice] = post("/v1/completions", " you", **fields)["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == len(ids) - 1
    assert others[0][str(second)]["logprob"] == -second / 1000
    assert "prompt_logprobs" not in post("/v1/completions", " you", prompt="Hello", logprobs=1, echo=True)["choices"][0]


def test_listed_tokens_replace_the_best_ones(service, harmony):
    service.engine.script = lambda _request: harmony(ANSWER)
    with service.client() as client:
        ask = client.chat.completions.create
        ask(model=MODEL, messages=USER, logprobs=True, extra_body={"logprob_token_ids": [7, 3]})
        assert service.engine.requests[-1].sampling.logprob_token_ids == (7, 3)
        assert service.engine.requests[-1].sampling.logprobs == 0
        for fields in ({}, {"logprobs": True, "top_logprobs": 2}):
            with pytest.raises(openai.BadRequestError) as caught:
                ask(model=MODEL, messages=USER, **fields, extra_body={"logprob_token_ids": [7]})
            assert caught.value.param == "logprob_token_ids"
        with pytest.raises(openai.BadRequestError) as caught:
            ask(model=MODEL, messages=USER, logprobs=True, extra_body={"logprob_token_ids": [10**6]})
        assert caught.value.param == "logprob_token_ids"


@rows("num_words, text", (0, "one "), (1, "one "), (2, "one two three "))
def test_stop_strings_match_no_text_of_the_first_tokens(num_words, text, post, tokenizer):
    words = ["one", " two", " three", " two", " four"]
    min_tokens = len(tokenizer.encode("".join(words[:num_words])))
    fields = {"prompt": "count", "max_tokens": 40, "stop": "two", "min_tokens": min_tokens}
    assert post("/v1/completions", "".join(words), **fields)["choices"][0]["text"] == text
    chunks = post("/v1/completions", "".join(words), **fields, stream=True)
    assert "".join(entry["text"] for chunk in chunks for entry in chunk["choices"]) == text


def prompt_of(service, tokenizer):
    return tokenizer.decode(service.engine.requests[-1].prompt_ids)


def test_the_last_message_is_continued(chat, service, tokenizer):
    begun = [*USER, {"role": "assistant", "content": "The capital <|end|> of  "}]
    answer = chat("France is Paris.<|return|>", messages=begun, continue_final_message=True)
    assert prompt_of(service, tokenizer).endswith("<|channel|>final<|message|>The capital <|end|> of  ")
    assert tokenizer.encode("<|end|>")[0] not in service.engine.requests[-1].prompt_ids[-12:], "text is data"
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("France is Paris.", None)
    chunks = chat("France is Paris.<|return|>", messages=begun, continue_final_message=True, stream=True)
    assert "".join(entry["delta"].get("content", "") for c in chunks for entry in c["choices"]) == "France is Paris."


def test_the_prompt_may_end_with_the_last_message(chat, service, tokenizer):
    chat(add_generation_prompt=False)
    without = prompt_of(service, tokenizer)
    chat(add_generation_prompt=True)
    assert prompt_of(service, tokenizer) == without + "<|start|>assistant"
    assert without.endswith("<|end|>")


@rows(
    "fields, param",
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "messages": SILENT}, "continue_final_message"),
    ({"continue_final_message": True, "messages": BEGUN, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ({"priority": 1.5}, "priority"),
    ({"priority": 2**40}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"return_token_ids": "yes"}, "return_token_ids"),
)
def test_values_that_make_no_sense_are_refused(fields, param, service):
    with service.http() as http:
        answer = http.post("/v1/chat/completions", json={"messages": USER, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_salt_and_priority_reach_the_engine(chat, service):
    chat(cache_salt="mine", priority=-3, n=2)
    assert [(each.cache_salt, each.priority) for each in service.engine.requests] == [("mine", -3)] * 2
    chat()
    assert (service.engine.requests[-1].cache_salt, service.engine.requests[-1].priority) == ("", 0)


class MarkedTokenizer:
    """One id for each letter, and control tokens."""

    def __init__(self, names):
        self.special_tokens = {name: 1000 + index for index, name in enumerate(names)}

    def encode(self, text, *, allow_special=True):
        return [ord(letter) for letter in text]


@rows(
    "prompt, begins_inside",
    (["<｜User｜>", "a", "<｜Assistant｜>", "<think>", "\n"], True),
    (["<｜User｜>", "a", "<｜Assistant｜>"], False),
    (["<｜Assistant｜>", "<think>", "a", "</think>"], False),
    ([], False),
)
def test_reasoning_of_deepseek_has_a_budget(prompt, begins_inside):
    tokenizer = MarkedTokenizer(MARKERS)
    known = tokenizer.special_tokens
    budget = thinking_budget(tokenizer, [known.get(each) or ord(each) for each in prompt], 5)
    assert (budget.num_tokens, budget.begins_inside, budget.barred_id) == (5, begins_inside, None)
    assert (budget.begin_ids, budget.close_ids) == ((known["<think>"],), (known["</think>"],))
    assert known["<｜tool▁calls▁begin｜>"] in budget.end_ids
    assert thinking_budget(MarkedTokenizer(["<s>"]), [], 5) is None


@rows(
    "ending, begins_inside", ("<|start|>assistant", False), ("<|start|>assistant<|channel|>analysis<|message|>So", True)
)
def test_reasoning_of_gpt_oss_has_a_budget(ending, begins_inside, tokenizer):
    budget = thinking_budget(tokenizer, tokenizer.encode(ending), 5)
    assert budget.begins_inside == begins_inside
    assert budget.barred_id == tokenizer.encode("analysis")[0]


def test_the_bundled_model_stops_thinking_when_it_must(bundled_url):
    """With the real engine: the same first words of reasoning, then the answer; nothing else of the syntax is lost."""
    with openai.OpenAI(base_url=f"{bundled_url}/v1", api_key="none") as client:
        ask = client.chat.completions.create
        fields = {"model": client.models.list().data[0].id, "messages": USER, "temperature": 0, "max_tokens": 120}
        free = ask(**fields)
        num_thought = free.usage.completion_tokens_details.reasoning_tokens
        assert num_thought > 3
        for budget in (0, 3, num_thought + 50):
            limited = ask(**fields, extra_body={"thinking_token_budget": budget})
            assert limited.usage.completion_tokens_details.reasoning_tokens <= min(budget, num_thought)
            message = limited.choices[0].message
            assert free.choices[0].message.reasoning.startswith(message.reasoning or "")
            assert message.content
            assert "<|" not in message.content
        assert limited.choices[0].message.content == free.choices[0].message.content
        begun = [*USER, {"role": "assistant", "content": "The capital of"}]
        more = ask(**{**fields, "messages": begun}, extra_body={"continue_final_message": True})
        assert more.choices[0].message.content
        listed = ask(**fields, logprobs=True, extra_body={"logprob_token_ids": [5, 9]}).choices[0].logprobs.content
        assert all(len(entry.top_logprobs) == 2 for entry in listed)


@rows(
    "shown, fields",
    ("one two", {"stop": "two"}),
    ("one two", {"stop": ["nothing", " two"]}),
    ("one tw", {"stop": "tw", "logprobs": 0}),  # in the middle of a token
    ("one two", {"stop_token_ids": " two"}),
)
def test_what_stops_an_answer_may_be_part_of_it(shown, fields, post, tokenizer, service):
    ids = tokenizer.encode("one two")
    if "stop_token_ids" in fields:
        fields = {"stop_token_ids": ids[-1:]}
        service.engine.last = lambda _request, num_tokens: {"stop_reason": ids[-1], "finish_reason": "stop"}
    transcript = "one two" if "stop_token_ids" in fields else "one two three"
    for included in (True, False):
        body = {"prompt": "count", "max_tokens": 40, **fields, "include_stop_str_in_output": included}
        whole = post("/v1/completions", transcript, **body)["choices"][0]
        chunks = post("/v1/completions", transcript, **body, stream=True)
        streamed = "".join(entry["text"] for chunk in chunks for entry in chunk["choices"])
        assert whole["text"] == streamed
        assert (streamed == shown) == included
        assert shown.startswith(streamed)
        assert whole["finish_reason"] == "stop"
        if included and whole["logprobs"]:
            assert "".join(whole["logprobs"]["tokens"]) == shown


def test_timings_say_where_the_time_went(chat, post, service):
    service.engine.delay_s = 0.01
    fields = {"return_timings": True, "n": 2}
    whole = chat(**fields)["timings"]
    *_, last = chat(**fields, stream=True)
    assert last["choices"] == []
    assert "usage" not in last
    *_, with_usage = chat(**fields, stream=True, stream_options={"include_usage": True})
    assert with_usage["usage"]["completion_tokens"] > 0
    for timings in (whole, last["timings"], with_usage["timings"]):
        assert timings["first_token_ms"] >= 10
        assert timings["decode_ms"] >= 10
        assert timings["total_ms"] >= timings["first_token_ms"] + timings["decode_ms"]
        assert timings["queue_ms"] == timings["prefill_ms"] == 0, "the scripted engine tells no times"
    assert post("/v1/completions", prompt="Hi", return_timings=True)["timings"]["total_ms"] > 0
    assert "timings" not in chat()
