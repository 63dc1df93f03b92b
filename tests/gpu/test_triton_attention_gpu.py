"""The Triton attention kernels on a card against torch in fp32: lengths, borders of windows and pages, captured."""

from dataclasses import replace

import pytest
import torch

from benchmarks.bench_attention import FULL, SLIDING, TOLERANCE, Case, Inputs, reference
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


SPECS = {"full": FULL, "sliding": SLIDING, "mha": replace(FULL, num_heads=8), "wide": WIDE}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_triton_equals_torch(case: Case, spec: AttentionSpec) -> None:
    inputs = Inputs(case, spec, seed=len(case.name))
    want = reference(inputs, spec)
    attention = make_attention("auto", [spec], DEVICE)
    assert attention.name == "triton"
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
