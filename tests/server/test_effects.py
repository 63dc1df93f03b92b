"""What parameters do to answers of the real engine, over HTTP. Each row compares two answers of the bundled model."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.server.conftest import wait_until
from tests.tables import rows

GREEDY = {"temperature": 0}
HOT = {"temperature": 2.0, "seed": 3}
LONG = {"temperature": 0, "max_tokens": 40}  # it repeats itself
ENDLESS = {"prompt": "Hi", "ignore_eos": True, "max_tokens": 3000}


@pytest.fixture
def http(bundled_url):
    with httpx2.Client(base_url=bundled_url, timeout=60) as http:
        yield http


@pytest.fixture
def ids_of(http):
    """Ids of the answer; the prompt is one after which the model is sure of nothing."""

    def ask(fields):
        body = {"prompt": "Tell me a story about a dog and", "max_tokens": 12, "return_token_ids": True, **fields}
        answer = http.post("/v1/completions", json={"ignore_eos": True, **body}).raise_for_status().json()
        return answer["choices"][0]["token_ids"]

    return ask


def equal(one, other):
    return one == other


def differ(one, other):
    return one != other


def more_kinds(one, other):
    """Whether the first answer repeats itself less."""
    return len(set(one)) > len(set(other))


@rows(
    "one, relation, other",
    (HOT, differ, GREEDY),
    ({**HOT, "top_k": 1}, equal, GREEDY),
    ({**HOT, "top_p": 1e-6}, equal, GREEDY),
    ({**HOT, "min_p": 1.0}, equal, GREEDY),
    (HOT, equal, HOT),
    (HOT, differ, {**HOT, "seed": 4}),
    ({**HOT, "max_tokens": 40, "presence_penalty": 2.0}, differ, {**HOT, "max_tokens": 40, "presence_penalty": -2.0}),
    ({**LONG, "frequency_penalty": 2.0}, more_kinds, LONG),
    ({**LONG, "repetition_penalty": 3.0}, more_kinds, LONG),
)
def test_parameters_change_answers_as_they_should(one, relation, other, ids_of):
    assert relation(ids_of(one), ids_of(other))


def test_each_effort_has_a_prompt_of_its_own(http):
    prompts = []
    for effort in ("low", "medium", "high"):
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "return_token_ids": True}
        answer = http.post("/v1/chat/completions", json={**body, "reasoning_effort": effort}).raise_for_status()
        ids = answer.json()["prompt_token_ids"]
        text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        assert f"Reasoning: {effort}" in text
        prompts.append(ids)
    assert prompts[0] != prompts[1] != prompts[2]


def test_prompts_are_shared_within_a_salt_only(http):
    salt = f"salt {time.monotonic()}"

    def num_cached(salt):
        body = {"prompt": "One, two, three, four. " * 30, "max_tokens": 1, "cache_salt": salt}
        usage = http.post("/v1/completions", json=body).raise_for_status().json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert num_cached(salt) == 0
    assert num_cached(salt) > 0
    assert num_cached(f"other {salt}") == 0


def test_urgent_requests_run_first_and_time_in_the_queue_counts(http):
    """All 16 places of the model are taken; then one comes free, and the urgent request gets it, which came last."""

    def ask(headers=None, **fields):
        return http.post("/v1/completions", json={"prompt": "Hi", "return_timings": True, **fields}, headers=headers)

    def num(kind):
        return http.get("/load").json()[kind]

    with ThreadPoolExecutor(5) as pool:
        runs = [
            pool.submit(ask, {"X-Request-Id": name}, **{**ENDLESS, "n": n, "priority": -10})
            for name, n in (("most", 15), ("last", 1))
        ]
        wait_until(lambda: num("running") == 16, 30)
        patient = pool.submit(ask, priority=5, max_tokens=1)
        wait_until(lambda: num("waiting") == 1, 30)
        urgent = pool.submit(ask, priority=-5, max_tokens=5)
        wait_until(lambda: num("waiting") == 2, 30)
        late = ask({"X-Request-Timeout": "0.2"}, priority=9)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        http.post("/abort_request", json={"rid": "last"})
        assert patient.result(60).status_code == urgent.result(60).status_code == 200
        http.post("/abort_request", json={"rid": "most"})
        assert [run.result(60).status_code for run in runs] == [499, 499]
    queued = [each.result().json()["timings"]["queue_ms"] for each in (patient, urgent)]
    assert queued[0] > queued[1] > 0
