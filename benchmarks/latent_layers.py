"""What the benchmarks of latent decodes time: attention of several layers of DeepSeek-V3 in one CUDA graph.

A layer is the FP8 product that makes queries, latent attention, and the FP8 output projection, whose launches overlap
with those of attention. Every layer has weights and a cache of its own, which together exceed the L2, as in a model.
"""

from dataclasses import replace

import torch
from torch.nn import functional as F

from benchmarks.bench_attention import LATENT, NUM_COPIES, PAGE_SIZE, Inputs, decode_case, graph_us
from model.attention.triton import TritonAttention
from model.fp8_linear import Fp8Linear
from model.norm import RmsNorm
from moe.formats import Fp8BlockWeight

NUM_KEYS = 1250
_TABLE_KEYS = 32768  # an engine's page table has room for the longest request, which is what parts are counted by
_NOPE, _ROPE, _LATENT, _VALUE, _Q_LATENT, _HIDDEN = 128, 64, 512, 128, 1536, 7168


class LatentLayers:
    """The weights of NUM_COPIES layers with so many heads on a rank."""

    def __init__(self, num_heads: int) -> None:
        self.spec = replace(LATENT, num_heads=num_heads)
        self._generator = torch.Generator("cuda").manual_seed(num_heads)
        self._q_up, self._out, self._uk, self._uv = [], [], [], []
        self._norm = RmsNorm(torch.ones(_LATENT, device="cuda"), 1e-6)
        for _ in range(NUM_COPIES):
            self._q_up.append(self._linear(num_heads * (_NOPE + _ROPE), _Q_LATENT))
            self._out.append(self._linear(_HIDDEN, num_heads * _VALUE))
            self._uk.append((self._normal(num_heads, _NOPE, _LATENT) / _NOPE**0.5).bfloat16())
            self._uv.append((self._normal(num_heads, _LATENT, _VALUE) / _LATENT**0.5).bfloat16())

    def step(self, num_requests: int) -> "LatentStep":
        """A decode of requests of NUM_KEYS tokens."""
        return LatentStep(self, num_requests)

    def run(self, step: "LatentStep") -> torch.Tensor:
        """Hidden states [T, hidden] after all layers; each makes queries and latents of what the one before gave."""
        x_TH, spec = step.x_TH, self.spec
        for q_up, uk, uv, out, kv in zip(self._q_up, self._uk, self._uv, self._out, step.caches, strict=True):
            q_THE = q_up(x_TH[:, :_Q_LATENT]).view(-1, spec.num_heads, _NOPE + _ROPE)
            q_nope_THN, q_pe_THP = q_THE.split((_NOPE, _ROPE), dim=-1)
            q_THD = x_TH.new_empty(len(x_TH), spec.num_heads, spec.key_dim)
            torch.bmm(q_nope_THN.transpose(0, 1), uk, out=q_THD[..., :_LATENT].transpose(0, 1))
            latents_TD = x_TH[:, _Q_LATENT : _Q_LATENT + _LATENT + _ROPE]
            mixed_THC = step.attention.run_latents(
                spec, step.plan, kv, q_THD, q_pe_THP, latents_TD, self._norm, step.rotation_T1D
            )
            out_THV = x_TH.new_empty(len(x_TH), spec.num_heads, _VALUE)
            torch.bmm(mixed_THC.transpose(0, 1), uv, out=out_THV.transpose(0, 1))
            x_TH = out(out_THV.flatten(1))
        return x_TH

    def measure(self, step: "LatentStep") -> tuple[float, torch.Tensor]:
        """Microseconds of one layer in a CUDA graph, and what comes out of all.

        Raises:
            RuntimeError: a replay gives other numbers than a run without a graph.
        """
        want = self.run(step)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = self.run(step)
        time_us = graph_us(graph) / NUM_COPIES
        if not torch.equal(got, want):
            raise RuntimeError("a replayed graph gives another result than an eager call")
        return time_us, want

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=self._generator)

    def _linear(self, num_outputs: int, num_inputs: int) -> Fp8Linear:
        weight = self._normal(num_outputs, num_inputs).div_(num_inputs**0.5)
        return Fp8Linear(Fp8BlockWeight.quantize(weight), None)


class LatentStep:
    """Inputs, caches and plan of one decode step."""

    def __init__(self, layers: LatentLayers, num_requests: int) -> None:
        inputs = Inputs(decode_case(num_requests, NUM_KEYS), layers.spec, num_requests)
        table = inputs.batch.page_table_BP
        table = F.pad(table, (0, _TABLE_KEYS // PAGE_SIZE - table.shape[1]))
        self.attention = TritonAttention([layers.spec], torch.device("cuda"))
        self.max_keys = table.shape[1] * PAGE_SIZE
        self.plan = self.attention.plan(replace(inputs.batch, page_table_BP=table))
        self.caches = inputs.caches
        generator = torch.Generator("cuda").manual_seed(num_requests)
        self.x_TH = torch.randn(num_requests, _HIDDEN, device="cuda", generator=generator).bfloat16()
        angles = torch.randn(num_requests, 1, _ROPE // 2, device="cuda", generator=generator)
        self.rotation_T1D = torch.polar(torch.ones_like(angles), angles)


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative; infinite for NaN."""
    error = (got.float() - want.float()).norm() / want.float().norm()
    return float(error.nan_to_num(float("inf")))
