"""Runs the kernels of latent attention, from projections on, in Triton's interpreter; prints differences from torch.

Started as a program of its own, since Triton decides when it is imported whether it compiles or interprets.
"""

import json
import sys
from dataclasses import replace

import torch

from model.attention.base import AttentionSpec, make_attention
from model.norm import RmsNorm
from tests.model.attention_cases import MLA
from tests.model.paged import PagedCache

CPU = torch.device("cpu")
ODD = replace(MLA, num_heads=35, key_dim=26, value_dim=20)  # two blocks of heads, no power of two
STEPS = [{"a": [0] * 5, "b": [0] * 3}, {"b": [0], "a": [0]}]


def outputs_and_cache(name: str, spec: AttentionSpec, dtype: torch.dtype, kv_dtype: torch.dtype) -> list[torch.Tensor]:
    """The same inputs for every implementation, as parts of wider tensors."""
    g = torch.Generator().manual_seed(0)
    attention = make_attention(name, [spec], CPU)
    cache = PagedCache([spec.kv_spec], dtype=kv_dtype)
    cache.layers[0].keys.copy_(torch.zeros(cache.layers[0].keys.shape))
    rope_dim = spec.key_dim - spec.value_dim
    norm = RmsNorm(torch.randn(spec.value_dim, generator=g), 0.1)
    results = []
    for step in STEPS:
        batch = cache.batch(step)
        num_tokens = batch.num_tokens
        q_THD = torch.randn(num_tokens, spec.num_heads, spec.key_dim, generator=g).to(dtype)
        q_up_THE = torch.randn(num_tokens, spec.num_heads, 8 + rope_dim, generator=g).to(dtype)
        down = torch.randn(num_tokens, 10 + spec.key_dim, generator=g).to(dtype)
        angles = torch.randn(num_tokens, 1, rope_dim // 2, generator=g)
        rotation = torch.polar(torch.ones_like(angles), angles)
        plan, kv = attention.plan(batch), cache.layers[0]
        pe, latents = q_up_THE[..., 8:], down[:, 10:]
        results.append(attention.run_latents(spec, plan, kv, q_THD, pe, latents, norm, rotation))
        results.append(q_THD)
    keys = cache.layers[0].keys
    return [*results, keys.view(torch.uint8).float() if kv_dtype == torch.float8_e4m3fn else keys]


def difference(spec: AttentionSpec, dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype = torch.float32) -> float:
    """The largest; infinite where the caches of FP8 bytes or a number's being one differ."""
    pairs = zip(*(outputs_and_cache(name, spec, dtype, kv_dtype) for name in ("triton", "torch")), strict=True)
    worst = [(got.double() - want.double()).abs().max().item() for got, want in pairs]
    return max(worst) if all(each == each for each in worst) else float("inf")


def share_of_other_halves() -> float:
    """Of the queries and keys in fp16, how many differ at all: a last bit of the norm may, here and there."""
    got, want = (outputs_and_cache(name, ODD, torch.float16, torch.float16) for name in ("triton", "torch"))
    differ = [(a != b).flatten() for a, b in zip(got, want, strict=True) if a.shape[-1] == ODD.key_dim]
    return torch.cat(differ).double().mean().item()


def main() -> None:
    differences = {
        "fp32": difference(MLA),
        "odd dims, two blocks of heads": difference(ODD),
        "FP8 bytes": difference(MLA, kv_dtype=torch.float8_e4m3fn),
        "fp16": max(0.0, share_of_other_halves() - 0.002),
    }
    json.dump(differences, sys.stdout)


if __name__ == "__main__":
    main()
