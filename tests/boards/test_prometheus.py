"""A real Prometheus scrapes a real service under load: every query of the board and every name of vLLM's has data.

`make boards` runs it; it needs `prometheus` and `promtool` (Debian's package `prometheus`).
"""

import json
import math
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from server import vllm_names
from tests.server.conftest import wait_until
from tests.server.service_process import free_port, start_bundled

pytestmark = [pytest.mark.boards, pytest.mark.timeout(300)]

BOARD = json.loads((Path(__file__).parents[2] / "deploy" / "grafana.json").read_text())
VARIABLES = {"$model": ".*", "$__rate_interval": "5s", "$__range": "1m"}
CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 400ms}}
scrape_configs: [{{job_name: moe-serve, static_configs: [{{targets: ["{target}"]}}]}}]
"""
HISTOGRAMS = [name for name in vllm_names.OURS if name.startswith("request_") or name.endswith("_seconds")]
HISTOGRAMS = [name for name in HISTOGRAMS if name != "request_success"] + ["iteration_tokens_total"]
NUM_CLIENTS = 3


@dataclass(frozen=True)
class World:
    """The service under load, and the Prometheus that scrapes it."""

    service: httpx2.Client
    prometheus: httpx2.Client

    def values(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series of an instant query."""
        for variable, value in VARIABLES.items():
            query = query.replace(variable, value)
        answer = self.prometheus.get("/api/v1/query", params={"query": query}).json()
        assert answer["status"] == "success", (query, answer)
        return [(each["metric"], float(each["value"][1])) for each in answer["data"]["result"]]

    def has_data(self, query: str) -> bool:
        """Whether any series has a number: the quantile of a histogram without news is NaN."""
        return any(not math.isnan(value) for _, value in self.values(query))

    def has_data_soon(self, query: str) -> bool:
        """Whether it has data within 20 s: a ratio is NaN for as long as its counters stand still."""
        with suppress(AssertionError):
            wait_until(lambda: self.has_data(query), 20)
        return self.has_data(query)


def ask_until(stop: threading.Event, url: str) -> None:
    """A client: answers of one choice and of two, streamed or not, and refusals."""
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 24}
    with httpx2.Client(base_url=url, timeout=60) as http:
        while not stop.is_set():
            for fields, status in (({}, 200), ({"stream": True}, 200), ({"n": 2}, 200), ({"n": -1}, 400)):
                assert http.post("/v1/chat/completions", json=body | fields).status_code == status


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("boards")
        service = stack.enter_context(start_bundled(folder, "--expert-load", "--metrics-names", "vllm"))
        (folder / "prometheus.yml").write_text(CONFIG.format(target=service.url.removeprefix("http://")))
        url = f"http://127.0.0.1:{free_port()}"
        command = [
            "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={url.removeprefix('http://')}",
        ]  # fmt: skip
        log = stack.enter_context((folder / "prometheus.log").open("w"))
        process = subprocess.Popen(command, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        world = World(
            service=stack.enter_context(httpx2.Client(base_url=service.url, timeout=30)),
            prometheus=stack.enter_context(httpx2.Client(base_url=url, timeout=30)),
        )
        wait_until(lambda: _is_ready(world.prometheus), 30)
        stop = threading.Event()
        clients = [threading.Thread(target=ask_until, args=(stop, service.url)) for _ in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        stack.callback(lambda: [client.join() for client in clients])
        stack.callback(stop.set)
        # Counters that begin with their first event have a rate once that is between two scrapes.
        wait_until(lambda: world.has_data("histogram_quantile(0.5, rate(moe_serve_decode_seconds_bucket[5s]))"), 60)
        wait_until(lambda: world.has_data("moe_serve_expert_tokens_total"), 60)  # sent every few hundred steps
        yield world


def _is_ready(prometheus: httpx2.Client) -> bool:
    with suppress(httpx2.TransportError):
        return prometheus.get("/-/ready").status_code == 200
    return False


def board_queries() -> list[tuple[str, str, str]]:
    """Panel, query and legend of everything that the board asks."""
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in BOARD["panels"]
        for target in panel.get("targets", [])
    ]


def test_every_query_of_the_board_returns_data(world):
    assert len(board_queries()) > 40
    for title, query, legend in board_queries():
        assert world.has_data_soon(query), (title, query)
        for labels, _ in world.values(query):
            assert set(labels) == {part.partition("}}")[0] for part in legend.split("{{")[1:]}, (title, labels)


def test_a_query_without_data_is_noticed(world):
    assert not world.has_data("rate(moe_serve_no_such_total[5s])")
    assert not world.has_data('moe_serve_engine_running{model="none"}')


def test_the_boards_variable_lists_the_model(world):
    [variable] = [each for each in BOARD["templating"]["list"] if each["name"] == "model"]
    metric, label = variable["definition"].removeprefix("label_values(").removesuffix(")").split(", ")
    answer = world.prometheus.get(f"/api/v1/label/{label}/values", params={"match[]": metric}).json()
    assert answer["data"] == ["tiny-gpt-oss"]


@pytest.mark.parametrize("name", ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"])
def test_vllms_gauges_have_data(world, name):
    [(labels, value)] = world.values(f'vllm:{name}{{model_name="tiny-gpt-oss", engine="0"}}')
    assert value >= 0, labels


@pytest.mark.parametrize(
    "name",
    ["prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens",
     "request_success", "admission_rejections", "corrupted_requests"],
)  # fmt: skip
def test_vllms_counters_have_rates(world, name):
    selector = 'model_name="tiny-gpt-oss", engine="0"'
    assert world.has_data(f"rate(vllm:{name}_total{{{selector}}}[5s])")
    labels = {"request_success": {"finished_reason"}, "admission_rejections": {"reason"}}.get(name, set())
    for found, _ in world.values(f"vllm:{name}_total"):
        assert set(found) == {"__name__", "instance", "job", "engine", "model_name"} | labels


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_vllms_histograms_have_quantiles(world, name):
    selector = 'model_name="tiny-gpt-oss", engine="0"'
    assert world.has_data(f"histogram_quantile(0.95, sum by (le) (rate(vllm:{name}_bucket{{{selector}}}[5s])))")
    assert world.has_data(f"rate(vllm:{name}_sum[5s]) / rate(vllm:{name}_count[5s])")


def test_the_numbers_of_steps_add_up(world):
    [(_, steps)] = world.values("moe_serve_engine_steps_total")
    [(_, sizes)] = world.values("moe_serve_engine_step_tokens_count")
    [(_, whole)] = world.values('moe_serve_engine_step_tokens_bucket{le="+Inf"}')
    assert abs(sizes - steps) < 200  # two queries, while it serves
    assert whole >= sizes > 0
    [(labels, one)] = world.values("vllm:cache_config_info")
    assert one == 1
    assert int(labels["block_size"]) * int(labels["num_gpu_blocks"]) > 0


def test_promtool_finds_our_metrics_well_formed(world):
    text = world.service.get("/metrics").text
    ours = "".join(line for line in text.splitlines(keepends=True) if "vllm:" not in line)  # its lint minds the colon
    done = subprocess.run(["promtool", "check", "metrics"], input=ours, capture_output=True, text=True, check=False)
    faults = [line for line in done.stderr.splitlines() if "_created" not in line]
    assert faults == []
