"""The same engine on a CUDA device: the answers of the CPU. Deselected by default (marker gpu)."""

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from tests.engine.requests import request, run_all, tokens_of

FOLDER = Path(__file__).parents[2] / "assets" / "tiny-gpt-oss"


@contextmanager
def exact_products():
    """No TF32. `monkeypatch` cannot put this setting back: it looks for the attribute in the object's dictionary."""
    products = torch.backends.cuda.matmul
    before = products.allow_tf32
    products.allow_tf32 = False
    try:
        yield
    finally:
        products.allow_tf32 = before


def test_the_precision_of_products_is_put_back():
    products = torch.backends.cuda.matmul
    before = products.allow_tf32
    try:
        for value in (True, False):
            products.allow_tf32 = value
            with exact_products():
                assert not products.allow_tf32
            assert products.allow_tf32 == value
    finally:
        products.allow_tf32 = before


@pytest.mark.gpu
def test_cuda_gives_the_tokens_of_the_cpu():
    with exact_products():
        compare_devices()


def compare_devices():
    requests = [
        request("greedy", range(100, 250), 32, ignore_eos=True, logprobs=3),
        request("sampled", range(300, 340), 32, ignore_eos=True, temperature=0.8, top_p=0.9, seed=5),
        request("ruled", range(50, 60), 32, ignore_eos=True, presence_penalty=1.0, logit_bias={7: 2.0}, min_tokens=4),
        request("scored", range(400, 420), 2, ignore_eos=True, prompt_logprobs=1),
    ]
    answers = []
    for device in ("cpu", "cuda"):
        config = EngineConfig(
            model=FOLDER,
            device=device,
            dtype="float32",
            moe_backend="torch",
            selfcheck="off",
            gpu_memory_utilization=0.5,
        )
        core = EngineCore(config)
        answers.append({name: tokens_of(outputs) for name, outputs in run_all(core, requests).items()})
        assert core.stats().num_pages_used == 0
    assert core.info.device.startswith("cuda")
    assert answers[0] == answers[1]
