"""Latent attention from projections on, on a card: against torch, and captured with the layers around it."""

import pytest
import torch

from benchmarks.bench_attention import FP8, LATENT, TOLERANCE, Case, Inputs
from model.attention.base import make_attention
from model.batch import LayerKv
from model.fp8_linear import Fp8Linear
from model.norm import RmsNorm
from moe.formats import Fp8BlockWeight

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
CASES = (
    Case("decodes", (1,) * 20, tuple(range(1, 2000, 100))),
    Case("chunks and decodes", (1, 300, 1, 17), (4000, 400, 128, 17)),
)


class Projections:
    """What the projections of one layer give, as parts of wider tensors."""

    def __init__(self, num_tokens: int) -> None:
        g = torch.Generator("cuda").manual_seed(num_tokens)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=DEVICE, generator=g)

        self.q_THD = normal(num_tokens, 128, 576).bfloat16()
        self.q_pe_THP = normal(num_tokens, 128, 192).bfloat16()[..., 128:]
        self.latents_TD = normal(num_tokens, 2112).bfloat16()[:, 1536:]
        self.norm = RmsNorm(normal(512).abs(), 1e-6)
        angles = normal(num_tokens, 1, 32)
        self.rotation_T1D = torch.polar(torch.ones_like(angles), angles)

    def run(self, name: str, inputs: Inputs, kv: LayerKv) -> torch.Tensor:
        attention = make_attention(name, [LATENT], DEVICE)
        given = (self.q_THD.clone(), self.q_pe_THP.clone(), self.latents_TD.clone())
        return attention.run_latents(LATENT, attention.plan(inputs.batch), kv, *given, self.norm, self.rotation_T1D)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_latents_are_stored_and_attended_as_by_torch(case: Case, kv_dtype: torch.dtype) -> None:
    inputs = Inputs(case, LATENT, 1, kv_dtype)
    projections = Projections(inputs.batch.num_tokens)
    caches = [LayerKv(inputs.caches[0].keys.clone(), inputs.caches[0].values) for _ in "ab"]
    got, want = (projections.run(name, inputs, kv) for name, kv in zip(("triton", "torch"), caches, strict=True))
    error_T = (got.float() - want.float()).flatten(1).norm(dim=1) / want.float().flatten(1).norm(dim=1)
    assert error_T.max() < 2 * TOLERANCE
    stored, meant = (kv.keys[inputs.batch.slots_T].float() for kv in caches)
    assert (stored - meant).norm() < 0.01 * meant.norm()
    assert (stored != meant).double().mean() < 0.01, "a last bit of the norm may differ here and there"


def test_a_chain_of_captured_layers_gives_the_same_bits_each_time() -> None:
    """FP8 layers and latent attention launched on each other's heels, beside a busy stream."""
    inputs = Inputs(Case("decodes", (1,) * 3, (100, 1000, 2000)), LATENT, 1)
    projections = Projections(3)
    attention = make_attention("triton", [LATENT], DEVICE)
    plan, kv = attention.plan(inputs.batch), inputs.caches[0]
    g = torch.Generator("cuda").manual_seed(1)

    def layer(*shape: int) -> Fp8Linear:
        return Fp8Linear(Fp8BlockWeight.quantize(torch.randn(shape, device=DEVICE, generator=g) * 0.02), None)

    down, up, out = layer(2112, 7168), layer(24576, 1536), layer(7168, 65536)
    x_TH = torch.randn(3, 7168, device=DEVICE, generator=g).bfloat16()

    def run() -> list[torch.Tensor]:
        given_TH, kept = x_TH, []
        for _ in range(8):
            latents_TD = down(given_TH)
            q_up_THE = up(latents_TD[:, :1536]).view(3, 128, 192)
            q_THD = projections.q_THD.clone()
            mixed_THC = attention.run_latents(
                LATENT, plan, kv, q_THD, q_up_THE[..., 128:], latents_TD[:, 1536:], projections.norm,
                projections.rotation_T1D,
            )  # fmt: skip
            given_TH = out(mixed_THC.flatten(1))
            kept += [given_TH, q_THD]
        return kept

    want = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    busy, matrix = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE)
    for _ in range(100):
        with torch.cuda.stream(busy):
            matrix @ matrix
        graph.replay()
        assert all(map(torch.equal, got, want))
