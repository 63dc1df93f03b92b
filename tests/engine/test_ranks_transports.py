"""The real engine on several processes, over gloo and emulated transport libraries, answers as one process does.

`make ranks` runs every pair of a transport and a backend that works with it; `make test` runs one.
"""

import asyncio
import contextlib

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.rank_client import RankedEngineClient
from tests.engine.emulated_rank_worker import VARIABLE, install
from tests.engine.requests import request, run_all, tokens_of
from tests.engine.test_client import collect
from tests.model import checkpoints
from tests.model.parallel_checkpoints import write_checkpoint

LIMIT = 64
DP2, SLICES = (1, 2), (2, 1)  # tensor and data parallel; every rank has its own experts
BOTH, DP4 = (2, 2), (1, 4)
EXACT = 1e-4  # of log-probabilities
TORCH = [
    ("gpt_oss", "torch", "deepep", mode, layout)
    for mode, layout in (("normal", SLICES), ("low_latency", BOTH), ("auto", DP2))
] + [("deepseek", "torch", "mooncake", "low_latency", SLICES), ("deepseek", "torch", "nixl", "low_latency", DP4)]
LIBRARIES = [
    ("deepseek", "deep_gemm", "deepep", "normal", DP2),
    ("deepseek", "deep_gemm", "deepep", "low_latency", SLICES),
    ("deepseek", "deep_gemm", "deepep", "auto", BOTH),
    ("deepseek", "deep_gemm", "mooncake", "low_latency", DP2),
    ("deepseek", "deep_gemm", "nixl", "low_latency", SLICES),
    ("deepseek", "aiter", "mori", "normal", DP2),
    ("deepseek", "aiter", "mori", "low_latency", BOTH),
    ("nvfp4", "flashinfer_cutedsl", "flashinfer", "auto", DP2),
    ("nvfp4", "flashinfer_cutedsl", "flashinfer", "auto", BOTH),
]
REQUESTS = [
    request(f"r{i}", range(3 + i, 5 + 4 * i), 6, ignore_eos=True, logprobs=0, prompt_logprobs=0) for i in range(1, 6)
]


def write_model(kind, folder):
    if kind != "nvfp4":
        return write_checkpoint(kind, folder)
    folder.mkdir()
    model = checkpoints.make_deepseek(
        hidden_size=256, moe_intermediate_size=128, vocab_size=97, kv_lora_rank=64, q_lora_rank=128
    )
    checkpoints.write(folder, checkpoints.pack_nvfp4(checkpoints.state_by_file_name(model, folder))[0])
    return folder


def config_of(folder, backend, **settings):
    return EngineConfig(
        model=folder, device="cpu", num_threads=1, moe_backend=backend, max_num_seqs=8, max_num_batched_tokens=LIMIT,
        deepep_max_dispatch_tokens=LIMIT, num_pages=64, selfcheck="first",
        dtype="float32" if backend == "torch" else "bfloat16", **settings,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def running(config):
    client = RankedEngineClient(config, worker_module="tests.engine.emulated_rank_worker")
    await client.start()
    try:
        while not (client.ready or client.failure):  # pytest ends a test that hangs
            await asyncio.sleep(0.05)
        assert client.failure is None
        yield client
    finally:
        await client.close()


def prompt_logprobs(answers):
    """Of every prompt token; they do not depend on which tokens were chosen."""
    return np.array([
        entry.logprob
        for each in REQUESTS
        for output in answers[each.request_id]
        for entry in (output.prompt_logprobs or [])[1:]
    ])  # fmt: skip


def error(answers, exact):
    """Root of the mean square."""
    return float(np.sqrt(np.mean((prompt_logprobs(answers) - prompt_logprobs(exact)) ** 2)))


def check(monkeypatch, folder, case):
    _, backend, a2a, mode, (tp, dp) = case
    names = ["wide"] if backend == "torch" else [backend.removeprefix("flashinfer_")]
    with pytest.MonkeyPatch.context() as patch:
        install(patch, names)
        alone = run_all(EngineCore(config_of(folder, backend)), REQUESTS)
    monkeypatch.setenv(VARIABLE, ",".join(names))
    config = config_of(
        folder, backend, moe_a2a_backend=a2a, deepep_mode=mode, tensor_parallel_size=tp, data_parallel_size=dp,
        expert_parallel_size=tp * dp,
    )  # fmt: skip

    async def main():
        async with running(config) as client:
            assert all(f"{backend} / {a2a}" in path for path in client.info.moe_paths)
            return await asyncio.gather(*(collect(client, each) for each in REQUESTS))

    answers = {outputs[0].request_id: outputs for outputs in asyncio.run(main())}
    assert all(len(tokens_of(outputs)) == 6 for outputs in answers.values())
    if backend == "torch":
        assert {name: tokens_of(outputs) for name, outputs in answers.items()} == {
            name: tokens_of(outputs) for name, outputs in alone.items()
        }
        assert error(answers, alone) < EXACT
    else:  # kernels round: several ranks are as near to the exact numbers as one is
        exact = run_all(EngineCore(config_of(folder, "torch")), REQUESTS)
        assert error(answers, exact) < 1.5 * error(alone, exact) + 0.01


def test_deepep_through_the_engine(tmp_path, monkeypatch):
    check(monkeypatch, write_model("gpt_oss", tmp_path / "model"), TORCH[2])


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [*TORCH[:2], *TORCH[3:], *LIBRARIES], ids=lambda case: "-".join(map(str, case[:4])))
def test_every_pair_through_the_engine(tmp_path, monkeypatch, case):
    check(monkeypatch, write_model(case[0], tmp_path / "model"), case)
