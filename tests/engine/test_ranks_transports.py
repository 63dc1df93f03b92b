"""The real engine on 2 and 4 processes, over gloo and emulated libraries, answers as one process does.

`make ranks` runs every row of the README's support table without a transport, and every pair of a backend and a
transport that work together in every mode; `make test` runs one. Triton's kernels run in its interpreter.
"""

import asyncio
import contextlib
import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.rank_client import RankedEngineClient
from moe import MoeA2ABackend, MoeBackend
from moe.dispatch.deepep_settings import DeepepMode
from moe.dispatch.transport import dispatch_formats
from moe.registry import load_backend, missing_formats
from tests.engine.emulated_rank_worker import VARIABLE, WIDE, install
from tests.engine.forked_rank_worker import VARIABLE as FORK_SERVER
from tests.engine.forked_rank_worker import ForkServer
from tests.engine.requests import request, run_all, tokens_of
from tests.engine.test_client import collect
from tests.model.parallel_checkpoints import write_checkpoint
from tests.test_support_table import ANY_DEVICE, BACKENDS, cases, write_format

LIMIT = 64
DP2, SLICES = (1, 2), (2, 1)  # tensor and data parallel; every rank has its own experts
BOTH, DP4 = (2, 2), (1, 4)
ONE_MODE = {"deepep_mode": "low_latency"}
FEW_TOKENS = {"max_num_batched_tokens": 16, "deepep_max_dispatch_tokens": 16}
EXACT = 1e-4  # of log-probabilities
REFUSED = {("deep_gemm", "sm100", "mooncake"): "cannot send power-of-two scales, which deep_gemm needs on SM100"}
ROWS = [row for row in cases() if ANY_DEVICE.get(row[0], row[2]) == row[2]]
REQUESTS = [
    request(f"r{i}", range(3 + i, 5 + 4 * i), 6, ignore_eos=True, logprobs=0, prompt_logprobs=0) for i in range(1, 6)
]
FEW_REQUESTS = [request("r1", range(5, 11), 2, ignore_eos=True, logprobs=0, prompt_logprobs=0)]


def pairs():
    """(backend, format, device, transport, mode, layout): formats and layouts in turn."""
    layouts = itertools.cycle((DP2, SLICES, BOTH, DP4))
    for backend in map(MoeBackend, BACKENDS):
        rows = itertools.cycle(row for row in ROWS if row[0] == backend)
        for a2a in load_backend(backend).transports:
            seen = set()
            for mode in DeepepMode:
                formats = dispatch_formats(a2a, mode)
                if a2a is MoeA2ABackend.NONE or formats in seen or missing_formats(backend, a2a, formats):
                    continue
                seen.add(formats)
                row = next(each for each in rows if (each[0], each[2], a2a) not in REFUSED)
                yield *row, a2a, mode if len(a2a.dispatch_formats) > 1 else "low_latency", next(layouts)


def config_of(folder, backend, **settings):
    return EngineConfig(
        model=folder, device="cpu", num_threads=1, moe_backend=backend, max_num_seqs=8, max_num_batched_tokens=LIMIT,
        deepep_max_dispatch_tokens=LIMIT, num_pages=64, selfcheck="off" if backend == "triton" else "first",
        dtype="float32" if backend == "torch" else "bfloat16", **settings,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def started(config, worker_module):
    """A client of ranks that are ready or have failed."""
    client = RankedEngineClient(config, worker_module=worker_module)
    await client.start()
    try:
        while not (client.ready or client.failure):  # pytest ends a test that hangs
            await asyncio.sleep(0.05)
        yield client
    finally:
        await client.close()


def prompt_logprobs(answers, requests):
    """Of every prompt token; they do not depend on which tokens were chosen."""
    return np.array([
        entry.logprob
        for each in requests
        for output in answers[each.request_id]
        for entry in (output.prompt_logprobs or [])[1:]
    ])  # fmt: skip


def error(answers, exact, requests=REQUESTS):
    """Of nine tokens in ten: where two experts are as good, rounding may choose the other for a token."""
    return float(np.quantile(abs(prompt_logprobs(answers, requests) - prompt_logprobs(exact, requests)), 0.9))


def run_ranks(config, requests=REQUESTS, worker_module="tests.engine.forked_rank_worker"):
    """What the ranks answer."""

    async def main():
        async with started(config, worker_module) as client:
            assert client.failure is None
            path = f"{config.moe_backend} / {config.moe_a2a_backend}"
            assert all(path in each for each in client.info.moe_paths)
            return await asyncio.gather(*(collect(client, each) for each in requests))

    answers = {outputs[0].request_id: outputs for outputs in asyncio.run(main())}
    assert all(len(tokens_of(answers[each.request_id])) == each.sampling.max_tokens for each in requests)
    return answers


def check(monkeypatch, folder, row, layouts, **options):
    """Run one row of the table in each of these (settings of the) layouts."""
    backend, _, arch = row
    emulated = WIDE if backend == "torch" else f"{backend}@{arch}"
    monkeypatch.setenv(VARIABLE, emulated)
    requests = FEW_REQUESTS if backend == "triton" else REQUESTS
    with pytest.MonkeyPatch.context() as patch:
        if backend == "triton":  # whose kernels take long in the interpreter
            alone = run_all(EngineCore(replace(config_of(folder, "torch"), dtype="bfloat16")), requests)
        elif backend != "torch":
            install(patch, emulated)
            alone = run_all(EngineCore(config_of(folder, backend)), requests)
    exact = run_all(EngineCore(config_of(folder, "torch")), requests)
    for layout in layouts:
        answers = run_ranks(replace(config_of(folder, backend), **layout), requests, **options)
        found = error(answers, exact, requests)
        if backend == "torch":
            assert {name: tokens_of(each) for name, each in answers.items()} == {
                name: tokens_of(each) for name, each in exact.items()
            }
            assert found < EXACT
        else:  # bf16 rounds: several ranks are as near to the exact numbers as one is
            assert found < 1.5 * error(alone, exact, requests) + 0.01


def layout(tp, dp, ep, **transport):
    return {"tensor_parallel_size": tp, "data_parallel_size": dp, "expert_parallel_size": ep, **transport}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders by format, written when they are first asked for."""
    folders = {}

    def folder_of(name):
        if name not in folders:
            folders[name] = write_format(name, tmp_path_factory.mktemp(name), num_parts=2)
        return folders[name]

    return folder_of


@pytest.fixture(scope="module")
def fork_server():
    """Addresses of the servers that fork ranks, with Triton's interpreter and without, started when first asked for."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def address(variable):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TRITON_INTERPRET", variable)
                return stack.enter_context(ForkServer("tests.engine.emulated_rank_worker"))

        yield address


@pytest.fixture
def forked(monkeypatch, fork_server):
    """Call it with a backend before its ranks start."""

    def prepare(backend):
        interpret = str(int(backend == "triton"))
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        monkeypatch.setenv(FORK_SERVER, fork_server(interpret))

    return prepare


@pytest.mark.processes
def test_deepep_through_the_engine(tmp_path, monkeypatch):
    folder = write_checkpoint("gpt_oss", tmp_path / "model")
    transport = {"moe_a2a_backend": "deepep", "deepep_mode": "auto"}
    row = ("torch", "mxfp4", "cpu")
    check(monkeypatch, folder, row, [layout(1, 2, 2, **transport)], worker_module="tests.engine.emulated_rank_worker")


@pytest.mark.ranks
@pytest.mark.parametrize("case", REFUSED, ids="-".join)
def test_what_a_transport_cannot_send_is_refused_at_start(monkeypatch, checkpoints, forked, case):
    backend, arch, a2a = case
    monkeypatch.setenv(VARIABLE, f"{backend}@{arch}")
    forked(backend)
    config = replace(config_of(checkpoints("fp8_block"), backend), **layout(1, 2, 2, moe_a2a_backend=a2a, **ONE_MODE))

    async def failure():
        async with started(config, "tests.engine.forked_rank_worker") as client:
            return client.failure

    assert f"--moe-a2a-backend {a2a}: " in (said := asyncio.run(failure()))
    assert REFUSED[case] in said


@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_every_row_of_the_support_table_on_two_and_four_ranks(forked, monkeypatch, checkpoints, row):
    """Two ranks divide every expert, four have their own."""
    forked(row[0])
    check(monkeypatch, checkpoints(row[1]), row, [layout(2, 1, 1), layout(2, 2, 4)])


@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", list(pairs()), ids=lambda case: "-".join(map(str, case[:5])))
def test_every_pair_of_a_backend_and_a_transport(forked, monkeypatch, checkpoints, case):
    *row, a2a, mode, (tp, dp) = case
    forked(row[0])
    transport = {"moe_a2a_backend": str(a2a), "deepep_mode": str(mode)}
    if row[:2] == ["aiter", "mxfp4"]:  # rounds to FP8 from 256 rows on, which one rank alone does not have
        (tp, dp), transport = SLICES, transport | FEW_TOKENS
    check(monkeypatch, checkpoints(row[1]), tuple(row), [layout(tp, dp, tp * dp, **transport)])
