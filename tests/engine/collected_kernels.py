"""Which kernels a start of the bundled model collects, and which it launches. Prints both as JSON; compiles none.

A program of its own, since Triton's driver is that of the process. Tensors are a CPU's, and the GPU is a fake: norms,
the router and small linear layers, which are torch's on a CPU, have no kernels here.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

from engine import gpu_sampler, load, runner
from engine.config import EngineConfig
from engine.model_settings import make_kv_layout
from engine.warm_up import run_prompt, run_step_sizes
from model import moe_build
from model.attention import triton as _attention  # noqa: F401 - a kernel is interpreted if INTERPRET is set by now
from model.config import ModelSettings
from model.registry import build_model
from moe import MoeA2ABackend, MoeBackend, MoeRunner, Topology
from moe.check import selfcheck
from moe.kernels import launch as _launch  # noqa: F401
from moe.kernels.compile_ahead import compile_ahead
from moe.registry import load_backend
from tests.gpu.permuted_scales import tiny_experts
from tests.moe.kernels import fake_gpu

MODEL = Path(__file__).parents[2] / "assets" / "tiny-gpt-oss"
CUDA = torch.device("cuda")
STEP_TOKENS = 128
SOME_TOKENS = (1, 2, 9, 16, 31, 65, 127)


class Keys:
    """Triton's own keys of the kernels that some code needs."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        triton.knobs.runtime.jit_cache_hook = self._on_kernel

    def of(self, run: Callable[[], object]) -> list[str]:
        """Those that `run` needs, sorted; none is compiled or launched."""
        self._seen = set()
        run()
        return sorted(self._seen)

    def _on_kernel(self, *, key: str, fn: Any, **_: Any) -> bool:
        self._seen.add(f"{fn.name.rpartition('.')[2]} {key}")
        return True


def no_errors(got_TH: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """What the self-check finds, since no kernel ran and all outputs are garbage."""
    return torch.zeros(len(got_TH) // selfcheck.TOKENS_PER_SIZE, 1)


def warm_up(keys: Keys) -> dict[str, list[str]]:
    """The warm-up collected, and launched, with some other numbers of tokens that a step may have."""
    settings = ModelSettings(dtype=torch.bfloat16, attention_backend="triton", selfcheck="all")
    with (
        mock.patch.object(moe_build, "choose_backend", return_value=MoeBackend.TRITON),
        mock.patch.object(moe_build, "compile_ahead") as ahead,
        mock.patch.object(selfcheck, "_errors", no_errors),
    ):
        model = build_model(MODEL, settings)
    assert model.can_compile_ahead
    config = EngineConfig(
        model=MODEL, max_num_seqs=16, max_num_batched_tokens=STEP_TOKENS, num_pages=64,
        load_format="dummy",  # no kernel runs, so that the logits are garbage
    )  # fmt: skip
    layout = make_kv_layout(config, model.kv_specs, model.dtype)

    def make_runner(num_pages: int) -> runner.ModelRunner:
        return runner.ModelRunner(
            model, layout.allocate(num_pages, model.device), page_size=config.page_size, max_num_seqs=16,
            max_model_len=model.max_model_len, is_sliding=layout.window is not None,
        )  # fmt: skip

    def start() -> None:
        engine = load.load_engine(config, model)
        for num_tokens in SOME_TOKENS:
            run_prompt(engine.runner, num_tokens)
        run_step_sizes(engine.runner, STEP_TOKENS)

    def launch_all() -> None:
        load._launch_all(config, make_runner, model.max_model_len, STEP_TOKENS, uses_graphs=True)

    return {
        "collected": keys.of(lambda: compile_ahead("warm-up", launch_all, CUDA)),
        "launched": keys.of(start),
        "ahead of the self-check": [call.args[0] for call in ahead.call_args_list],
    }


def self_check(keys: Keys) -> dict[str, list[str]]:
    """The self-check of a layer collected, and launched."""
    experts, config = tiny_experts(3, 8)
    topology, path = Topology(), MoeRunner(MoeBackend.TRITON, MoeA2ABackend.NONE, config)
    info = load_backend(MoeBackend.TRITON).prepare(experts, config, topology)

    def check() -> None:
        selfcheck.check_layer(path, info, experts, layer=3, topology=topology)

    def collect() -> None:
        compile_ahead("self-check", lambda: selfcheck.run_cases(path, info, experts, topology), CUDA)

    with mock.patch.object(selfcheck, "_errors", no_errors):
        return {"collected": keys.of(collect), "launched": keys.of(check)}


def main() -> dict[str, dict[str, list[str]]]:
    """Both parts."""
    fake_gpu.install()
    keys = Keys()
    triton.knobs.runtime.interpret = True  # backends then take the tensors of a CPU; the kernels are compiled ones
    with mock.patch.object(runner, "make_sampler", gpu_sampler.GpuSampler):
        return {"self-check": self_check(keys), "warm-up": warm_up(keys)}


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
