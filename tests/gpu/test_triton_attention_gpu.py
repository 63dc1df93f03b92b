"""The Triton attention kernels on a card against torch in fp32: lengths, borders of windows and pages, captured."""

from dataclasses import replace

import pytest
import torch

from benchmarks.bench_attention import FP8, FULL, LATENT, SLIDING, TOLERANCE, Case, Inputs, reference
from model.attention.base import AttentionSpec, make_attention
from model.batch import LayerKv

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 1000, 4097, 33000)
CASES = (
    Case("decodes of all lengths", (1,) * len(LENGTHS), LENGTHS),
    Case("one long decode", (1,), (33000,)),
    Case("prompts of all lengths", LENGTHS[:14], LENGTHS[:14]),
    Case("chunks and decodes", (1, 300, 1, 17, 2, 1, 129), (4000, 4000, 128, 17, 130, 1, 1000)),
    Case("a chunk late in a long prompt", (500,), (33000,)),
)
WIDE = AttentionSpec(num_heads=12, num_kv_heads=4, key_dim=128, value_dim=96, scale=0.1, window=100)
SMALL_LATENT = replace(LATENT, num_heads=80, key_dim=48, value_dim=32, window=100)
SPECS = {"full": FULL, "sliding": SLIDING, "mha": replace(FULL, num_heads=8), "wide": WIDE, "latent": LATENT,
         "small latent": SMALL_LATENT}  # fmt: skip
FP8_SPECS = {"full": FULL, "latent": LATENT}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_triton_equals_torch(case: Case, spec: AttentionSpec) -> None:
    check(case, spec, torch.bfloat16)


@pytest.mark.parametrize("spec", FP8_SPECS.values(), ids=FP8_SPECS)
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=lambda case: case.name)
def test_triton_equals_torch_on_an_fp8_cache(case: Case, spec: AttentionSpec) -> None:
    check(case, spec, FP8)


def test_fp8_bytes_are_torchs() -> None:
    """All of them, with ties, subnormals, what is out of range, and NaN."""
    case = Case("prompt", (64,), (64,))
    written = []
    for name in ("triton", "torch"):
        inputs = Inputs(case, FULL, 0, FP8)
        k = inputs.k.float() * 4.0 ** torch.arange(-6, 6, device=DEVICE).repeat(6)[:64]
        k[0, 0, :4] = torch.tensor([1.0625, 464.0, -float("inf"), float("nan")], device=DEVICE)
        attention = make_attention(name, [FULL], DEVICE)
        kv = inputs.caches[0]
        attention.run(FULL, attention.plan(inputs.batch), kv, inputs.q, k.bfloat16(), inputs.v, inputs.sinks)
        written.append(torch.cat((kv.keys.view(torch.uint8), kv.values.view(torch.uint8))))
    assert torch.equal(*written)


def check(case: Case, spec: AttentionSpec, kv_dtype: torch.dtype) -> None:
    inputs = Inputs(case, spec, seed=len(case.name), kv_dtype=kv_dtype)
    want = reference(inputs, spec)
    attention = make_attention("triton", [spec], DEVICE)
    plan = attention.plan(inputs.batch)

    def run(kv: LayerKv) -> torch.Tensor:
        return attention.run(spec, plan, kv, inputs.q, inputs.k, inputs.v, inputs.sinks)

    eager = run(inputs.caches[0])
    error_T = (eager.float() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
    assert error_T.max() < 2 * TOLERANCE  # per token, because one bad token would vanish in the norm of all
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(inputs.caches[0])
    captured.fill_(float("nan"))
    graph.replay()
    assert torch.equal(captured, eager)
