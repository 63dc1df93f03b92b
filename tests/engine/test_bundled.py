"""The engine with the bundled model: the same tokens in every company, in this process and in its own."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineConfigError
from loaders.source import TensorSource
from model.config import ModelSettings
from model.registry import build_model
from tests.engine.requests import request, run_all, tokens_of
from tests.tables import rows

FOLDER = Path(__file__).parents[2] / "assets" / "tiny-gpt-oss"
PROMPTS = [list(range(100, 100 + length)) for length in (3, 17, 150, 40, 64, 1)]
GREEDY, HOT, WARM = {}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}
KINDS = [GREEDY, HOT | {"seed": 12}, WARM | {"seed": 2}, GREEDY, HOT | {"seed": 3}, WARM | {"seed": 12}]
NUM_TOKENS = 16
SHAKE = 1e-3  # a hundred times the difference between logits of two batch sizes or two kinds of CPU


@pytest.fixture(scope="module")
def model():
    return build_model(FOLDER, ModelSettings(device=torch.device("cpu"), selfcheck="off"))


def make_core(model, **settings):
    return EngineCore(EngineConfig(model=FOLDER, device="cpu", **settings), model)


def test_more_pages_than_memory_are_refused_by_name(model):
    """It was torch's own message about its allocator."""
    with pytest.raises(EngineConfigError, match=r"num_pages is 2000000000: .* do not fit in memory"):
        make_core(model, num_pages=2 * 10**9)


def test_a_context_beyond_the_models_is_refused_before_weights_are_read(monkeypatch):
    """It was refused after them, without a way out."""
    monkeypatch.setattr(TensorSource, "view", lambda _self, name: pytest.fail(f"{name} was read"))
    words = "max_model_len is 5000: .* at most 4096 tokens; lower --max-model-len, or raise max_position_embeddings in"
    with pytest.raises(EngineConfigError, match=words):
        make_core(None, max_model_len=5000)


def make_requests():
    return [
        request(f"r{i}", prompt, NUM_TOKENS, ignore_eos=True, **kind)
        for i, (prompt, kind) in enumerate(zip(PROMPTS, KINDS, strict=True))
    ]


class Shaken:
    """A model whose logits are moved at random by up to SHAKE."""

    def __init__(self, model):
        self._model = model
        self._generator = torch.Generator().manual_seed(1)

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, batch, plan, kv):
        logits = self._model(batch, plan, kv)
        return logits + SHAKE * (2 * torch.rand(logits.shape, generator=self._generator) - 1)


@pytest.fixture(scope="module")
def expected(model):
    """Tokens of every request when it is alone, its prompt in one piece."""
    core = make_core(model, enable_prefix_caching=False)
    return {item.request_id: tokens_of(run_all(core, [item])[item.request_id]) for item in make_requests()}


def test_no_token_is_chosen_by_a_hair(model, expected):
    """Moving the logits changes no token, so the tests below may demand equal tokens; prompts are chosen for it."""
    outputs = run_all(make_core(Shaken(model)), make_requests())
    assert {name: tokens_of(outs) for name, outs in outputs.items()} == expected


@rows(
    "settings, preempts",
    ({}, False),
    ({"max_num_batched_tokens": 16, "max_num_seqs": 4}, False),
    ({"num_pages": 80, "page_size": 3}, True),
    ({"num_pages": 80, "page_size": 3, "overlap": True}, True),
    ({"max_num_batched_tokens": 16, "max_num_seqs": 4, "overlap": True}, False),
)
def test_tokens_are_the_same_in_every_company(model, expected, settings, preempts):
    core = make_core(model, **settings)
    outputs = run_all(core, make_requests())
    assert {name: tokens_of(outs) for name, outs in outputs.items()} == expected
    assert (core.stats().num_preemptions > 0) == preempts
    again = run_all(core, make_requests())  # now with cached prefixes
    assert {name: tokens_of(outs) for name, outs in again.items()} == expected
    assert again["r2"][-1].num_cached_tokens > 0


def test_prompt_logprobs_agree_with_logprobs_of_the_same_tokens(model):
    core = make_core(model, max_num_batched_tokens=64, enable_prefix_caching=False)
    [generated] = run_all(core, [request("a", PROMPTS[2], 8, logprobs=2, ignore_eos=True)]).values()
    tokens = tokens_of(generated)
    [scored] = run_all(core, [request("b", [*PROMPTS[2], *tokens], 1, prompt_logprobs=2)]).values()
    for output, entry in zip(generated, scored[0].prompt_logprobs[-8:], strict=True):
        assert entry.token_id == output.logprobs[0].token_id
        assert entry.logprob == pytest.approx(output.logprobs[0].logprob, abs=1e-3)
        assert [token for token, _ in entry.top] == [token for token, _ in output.logprobs[0].top]


def test_its_own_process_gives_the_same_tokens(expected):
    async def collect(client, item):
        return tokens_of([output async for output in client.generate(item)])

    async def main():
        client = EngineClient(EngineConfig(model=FOLDER, device="cpu", selfcheck="off", num_threads=1))
        await client.start()
        end = time.monotonic() + 90
        while not client.ready:
            assert client.failure is None, client.failure
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
        assert len(client.info.moe_paths) == 6
        requests = make_requests()
        answers = await asyncio.gather(*(collect(client, item) for item in requests))
        assert {item.request_id: answer for item, answer in zip(requests, answers, strict=True)} == expected
        await client.close()
        assert client.failure is None

    asyncio.run(main())


def test_a_missing_folder_is_named_in_the_failure():
    async def main():
        client = EngineClient(EngineConfig(model=Path("no-such-folder"), device="cpu"))
        await client.start()
        while client.failure is None:
            await asyncio.sleep(0.02)
        await client.close()
        return client.failure

    failure = asyncio.run(main())
    assert "no-such-folder" in failure
    assert "Traceback" not in failure


def test_a_cpu_engine_imports_nothing_that_it_does_not_use():
    """Start-up time: these take seconds each on a busy machine."""
    probe = (
        "import sys; from pathlib import Path; from engine import EngineConfig; from engine.core import EngineCore;"
        f"EngineCore(EngineConfig(model=Path({str(FOLDER)!r}), device='cpu', num_pages=300, num_threads=1));"
        "print({'transformers', 'flashinfer', 'triton', 'scipy', 'sympy', 'tokenizers', 'fastapi'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True, text=True, cwd=FOLDER.parents[1], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True,
    )  # fmt: skip
    assert done.stdout == "set()\n"
