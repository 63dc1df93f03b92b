"""Faults of a service on a card, with CUDA graphs and overlapped steps: what clients are told, and what is left behind.

Each service has the bundled model. `faulty_worker` breaks steps on the device itself; signals break the process.
"""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from tests.gpu.faulty_worker import BREAKS, CRASHES, HANGS, MOST_TOKENS, NO_MEMORY
from tests.server.conftest import ASSETS, wait_until
from tests.server.service_process import has_ended, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]
FAULTY = """
import functools, sys
import engine.client
import server.service
from server.start import main
server.service.EngineClient = functools.partial(engine.client.EngineClient, worker_module="tests.gpu.faulty_worker")
sys.exit(main())
"""
NUM_CLIENTS = 12
COUNTRIES = [
    "France",
    "Italy",
    "Spain",
    "Japan",
    "Norway",
    "Austria",
    "Peru",
    "Egypt",
    "Kenya",
    "Poland",
    "Cuba",
    "Chile",
]
TOLD_WITHIN_S, STEP_TIMEOUT_S = 5.0, 3.0
LONG = {"max_tokens": 4000, "temperature": 0, "ignore_eos": True, "stream": True}
SHORT = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
SLACK_MIB = 64


def used_mib():
    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


@contextmanager
def service_on_card(folder, *argv):
    """The service; afterwards the card has the memory that it had before."""
    before_mib = used_mib()
    command = [sys.executable, "-c", FAULTY, "--port", "0", "--model", str(ASSETS), "--num-pages", "8192", *argv]
    with run(command, folder) as service:
        assert service.url
        assert '"device": "cuda' in service.out
        yield service
    wait_until(lambda: used_mib() <= before_mib + SLACK_MIB, 20)


def prompt(index):
    return [100 + index, 7, 300 - index]


def last_event(response):
    return json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))


def ask_long(service, index):
    """Status of an endless stream, its last event and the time of its end."""
    with service.http() as http:
        response = http.post("/v1/completions", json={**LONG, "prompt": prompt(index)}, timeout=100)
    return response.status_code, last_event(response), time.monotonic()


@contextmanager
def clients(service):
    """Streams that all run; gives what `ask_long` says of each."""
    with ThreadPoolExecutor(NUM_CLIENTS) as pool, service.http() as http:
        asked = [pool.submit(ask_long, service, index) for index in range(NUM_CLIENTS)]
        wait_until(lambda: ((http.get("/health").json()["stats"] or {}).get("num_running")) == NUM_CLIENTS)
        yield asked


def need_told(asked, fault_s):
    for status, event, end_s in (each.result() for each in asked):
        assert (status, event["error"]["code"]) == (200, "unavailable")
        assert end_s - fault_s < TOLD_WITHIN_S


def answer(service, ids, **more):
    with service.http() as http:
        response = http.post("/v1/completions", json={**SHORT, "prompt": ids, **more}, timeout=100)
    return response.status_code, response.json()


def reply(service, country):
    messages = [{"role": "user", "content": f"What is the capital of {country}?"}]
    with service.http() as http:
        response = http.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, "max_tokens": 100})
    return response.json()["choices"][0]["message"]["content"]


def test_a_step_that_fails_on_the_card_changes_no_other_answer(tmp_path):
    """Out of memory: tried again with fewer tokens. Any other error of one request: that request fails alone."""
    with service_on_card(tmp_path) as service:
        alone = [reply(service, country) for country in COUNTRIES]
        with ThreadPoolExecutor(NUM_CLIENTS + 2) as pool:
            asked = [pool.submit(reply, service, country) for country in COUNTRIES]
            large = pool.submit(answer, service, [NO_MEMORY] + [9] * (3 * MOST_TOKENS))
            broken = pool.submit(answer, service, [BREAKS, 9])
            texts = [each.result() for each in asked]
        assert texts == alone
        assert large.result()[0] == 200
        assert broken.result()[0] == 500
        assert "out of memory in a step of" in service.err
        service.signal(signal.SIGTERM)
        assert service.process.wait(30) == 0


def test_an_illegal_access_ends_the_engine_and_all_are_told(tmp_path):
    with service_on_card(tmp_path, "--exit-on-engine-death") as service, clients(service) as asked:
        start_s = time.monotonic()
        assert answer(service, [CRASHES, 9])[0] == 503
        need_told(asked, start_s)
        assert service.process.wait(30) == 1
    assert "device-side assert" in service.err


def test_a_kernel_that_never_ends_is_ended_by_the_time_of_a_step(tmp_path):
    argv = ("--exit-on-engine-death", "--step-timeout", str(STEP_TIMEOUT_S))
    with service_on_card(tmp_path, *argv) as service, clients(service) as asked:
        start_s = time.monotonic()
        assert answer(service, [HANGS, 9])[0] == 503
        need_told(asked, start_s + STEP_TIMEOUT_S)
        assert service.process.wait(30) == 1
    assert "a step has taken longer than step_timeout" in service.err


def test_a_killed_engine_leaves_no_client_waiting_and_no_memory_behind(tmp_path):
    with service_on_card(tmp_path, "--exit-on-engine-death") as service, clients(service) as asked:
        engine_pid = service.engine_pid
        start_s = time.monotonic()
        os.kill(engine_pid, signal.SIGKILL)
        need_told(asked, start_s)
        assert service.process.wait(30) == 1
        assert has_ended(engine_pid)
    assert "was killed by signal 9" in service.err


def test_a_stopped_engine_is_not_drained(tmp_path):
    with service_on_card(tmp_path) as service, clients(service) as asked:
        engine_pid = service.engine_pid
        os.kill(engine_pid, signal.SIGSTOP)
        start_s = time.monotonic()
        service.signal(signal.SIGTERM)
        assert service.process.wait(30) == 1
        assert time.monotonic() - start_s < 10
        assert {each.result()[1]["error"]["code"] for each in asked} == {"unavailable"}
        assert has_ended(engine_pid)
    assert "the engine hangs" in service.err


def test_running_requests_are_finished_after_sigterm(tmp_path):
    with service_on_card(tmp_path) as service, ThreadPoolExecutor(NUM_CLIENTS) as pool, service.http() as http:
        asked = [pool.submit(answer, service, prompt(index), max_tokens=2000) for index in range(NUM_CLIENTS)]
        wait_until(lambda: (http.get("/health").json()["stats"] or {}).get("num_running"))
        service.signal(signal.SIGTERM)
        assert {each.result()[0] for each in asked} <= {200, 503}
        assert service.process.wait(30) == 0
    assert sum(each.result()[0] == 200 for each in asked) > 0
