"""Kernels compiled ahead on a card: nothing is launched, then the launches find them and compute what they should."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from engine.compile_watch import CompileWatch
from engine.config import EngineConfig
from engine.load import load_engine
from engine.warm_up import run_prompt
from model import few_rows
from moe.kernels.compile_ahead import compile_ahead

pytestmark = pytest.mark.gpu
MODEL = Path(__file__).parents[2] / "assets" / "tiny-gpt-oss"


def test_a_kernel_compiled_ahead_runs_without_another_compilation(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    x, weight = torch.randn(4, 640, device="cuda").bfloat16(), torch.randn(160, 640, device="cuda").bfloat16()
    compile_ahead("a test", lambda: few_rows.linear(x, weight, None), x.device)
    assert "a test: compiled or loaded 1 kernels ahead" in caplog.text
    watch = CompileWatch()
    watch.begin()
    got = few_rows.linear(x, weight, None)
    watch.end()
    assert watch.count == 0
    assert torch.allclose(got.float(), linear(x.float(), weight.float()), rtol=2e-2, atol=2e-1)


def test_no_prompt_after_a_start_compiles_a_kernel() -> None:
    """All that the collected passes left out would show here, as it would in a start that compiles one by one."""
    engine = load_engine(EngineConfig(model=MODEL, num_pages=2000), None)
    watch = CompileWatch()
    watch.begin()
    for num_tokens in (1, 2, 15, 16, 17, 100, 500, 1000, 2000, 4000):
        run_prompt(engine.runner, num_tokens)
    torch.cuda.synchronize()
    watch.end()
    assert watch.count == 0
