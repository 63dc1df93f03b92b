"""The bundled model through the whole service on 2 and 4 ranks, divided every way: the greedy text of one rank."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from engine.expert_file import read_load
from server import cli
from tests.server.conftest import wait_until
from tests.server.service_process import ROOT
from tests.server.test_ranks_bundled import ask, serving

pytestmark = pytest.mark.ranks

NUM_PROMPTS = 200
NUM_TOKENS = 12
LEAST_TOKENS = 2 * NUM_PROMPTS * NUM_TOKENS / 2  # of each layer: each goes to two experts; some answers are short
CATEGORIES = ("facts", "addition", "sorting", "definitions")
TP2, DP2, EP2, EP4 = (
    (f"--{name}-parallel-size", size)
    for name, size in (("tensor", "2"), ("data", "2"), ("expert", "2"), ("expert", "4"))
)
LAYOUTS = {
    "tp2": TP2,
    "tp2-ep2": (*TP2, *EP2),
    "dp2-ep2": (*DP2, *EP2),
    "dp2-ep2 with replicas": (*DP2, *EP2, "--enable-eplb", "--eplb-interval", "8"),
    "tp2-ep2 with replicas": (*TP2, *EP2, "--enable-eplb", "--eplb-interval", "8"),
    "tp4": ("--tensor-parallel-size", "4"),
    "tp4-ep4": ("--tensor-parallel-size", "4", *EP4),
    "dp4-ep4 with replicas": ("--data-parallel-size", "4", *EP4, "--enable-eplb", "--eplb-interval", "8"),
    "dp4-ep4": ("--data-parallel-size", "4", *EP4),
    "tp2-dp2-ep4": (*TP2, *DP2, *EP4),
}


def questions():
    found = []
    for category in CATEGORIES:
        with (ROOT / "evals" / "data" / f"{category}.jsonl").open() as lines:
            found += [json.loads(next(lines))["messages"][0]["content"] for _ in range(NUM_PROMPTS // len(CATEGORIES))]
    return found


def ask_all(url):
    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(lambda question: ask(url, question, max_tokens=NUM_TOKENS)[0], questions()))


def num_reported(url):
    """Tokens of the last layer, by all experts, as of the last report of the ranks."""
    return sum(httpx2.get(f"{url}/expert_load", timeout=20).json()["layers"][-1]["tokens"])


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What one rank answers."""
    with serving(tmp_path_factory.mktemp("one")) as url:
        return ask_all(url)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_text_is_that_of_one_rank(layout, answers, tmp_path):
    assert len({json.dumps(answer) for answer in answers}) > NUM_PROMPTS / 4, "the answers differ from each other"
    with serving(tmp_path, *LAYOUTS[layout]) as url:
        got = ask_all(url)
        if "replicas" in layout:  # the ranks report when they rest, and a heartbeat takes the report along
            wait_until(lambda: num_reported(url) >= LEAST_TOKENS, 20)
        series = httpx2.get(f"{url}/metrics", timeout=20).text
        if "replicas" in layout:
            assert cli.main(["experts", "--record", str(tmp_path / "load"), "--port", url.rpartition(":")[2]]) == 0
    assert [index for index, pair in enumerate(zip(got, answers, strict=True)) if pair[0] != pair[1]] == []
    if "replicas" in layout:
        [moves] = [line.split()[1] for line in series.splitlines() if line.startswith("moe_serve_expert_moves_total")]
        assert float(moves) > 0, "experts moved while requests ran"
        num_tokens = {sum(layer) for layer in read_load(tmp_path / "load")}
        assert len(num_tokens) == 1, "every layer sees every token once"
        assert num_tokens.pop() >= LEAST_TOKENS
