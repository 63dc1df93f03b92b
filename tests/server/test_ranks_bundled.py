"""The bundled model through the whole service on two ranks: the text of one rank, nothing lost under a mixed load."""

import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx2
import pytest

from tests.server.conftest import wait_until
from tests.server.service_process import ROOT, ServiceProcess

pytestmark = pytest.mark.ranks

LAYOUTS = {
    "tp2": ("--tensor-parallel-size", "2"),
    "tp2-ep2": ("--tensor-parallel-size", "2", "--expert-parallel-size", "2"),
    "dp2-ep2": ("--data-parallel-size", "2", "--expert-parallel-size", "2"),
}
QUESTIONS = [f"What is {a} plus {b}?" for a, b in zip(range(3, 13), range(20, 30), strict=True)] + [
    f"Name {what}." for what in ("a colour", "a city", "a river", "an animal", "a fruit", "a planet", "a metal",
                                 "a number", "a language", "a month")
]  # fmt: skip


@contextmanager
def serving(folder, *argv):
    """The address of the service with these flags; it must end well."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "server", "--port", "0", "--num-threads", "1", "--device", "cpu", *argv]
    with (
        open(folder / "out", "w") as out,
        open(folder / "err", "w") as err,
        subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT) as process,
    ):
        try:
            yield ServiceProcess(process, folder).url
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def ask(url, question, **fields):
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0, **fields}
    answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=110)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    return choice["message"], choice["finish_reason"]


def ask_all(url):
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda question: ask(url, question), QUESTIONS))


def leave_early(url, index):
    """Read a little of a stream and close the connection."""
    body = {"prompt": f"Count from {index}: ", "max_tokens": 200, "temperature": 0, "stream": True, "ignore_eos": True}
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=110) as answer:
        next(answer.iter_lines())


def stats(url):
    return httpx2.get(f"{url}/health", timeout=10).json()["stats"]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What one rank answers."""
    with serving(tmp_path_factory.mktemp("one")) as url:
        return ask_all(url)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_text_is_that_of_one_rank_and_nothing_is_lost(layout, answers, tmp_path):
    with serving(tmp_path, *LAYOUTS[layout]) as url:
        assert ask_all(url) == answers
        expected = dict(zip(QUESTIONS, answers, strict=True))
        random.seed(1)
        asked = random.choices(QUESTIONS, k=48)
        with ThreadPoolExecutor(64) as pool:
            leaving = [pool.submit(leave_early, url, index) for index in range(16)]
            answered = list(pool.map(lambda question: ask(url, question), asked))
            for each in leaving:
                each.result()
        assert answered == [expected[question] for question in asked]
        wait_until(lambda: (stats(url)["num_running"], stats(url)["num_pages_used"]) == (0, 0), 30)
        assert stats(url)["num_waiting"] == 0
