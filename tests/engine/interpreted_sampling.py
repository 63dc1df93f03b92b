"""Runs the sampling kernels in Triton's interpreter against the torch path; prints what differs, by case, as JSON.

Started as a program of its own, since Triton decides when it is imported whether it compiles or interprets. Small tiles
make a row of a thousand tokens cross every border that a real one crosses: chunks, groups, a full list of candidates.
"""

import itertools
import json
import math
import random
import sys

import numpy as np
import torch

from engine.counter_rng import uniform
from engine.gpu_sampler import GpuSampler, Tiling
from engine.sampler import Sampled, launch_sampling
from engine.sequence import Sequence
from tests.engine.requests import request

SMALL = Tiling(chunk=256, group=16, list_size=64, block=32, max_groups=64)
NEAR = 1e-5  # of the whole mass: a draw this close to a border between two tokens may fall on either side


def make(index=0, prompt=(0,), output=(), seed=1, stop_ids=(), mask=None, **sampling):
    sampling.setdefault("temperature", 1.0)
    item = request(f"r{index}", prompt, 1000, **sampling)
    seq = Sequence(item, stop_ids=frozenset(stop_ids), seed=seed, logit_mask=mask)
    seq.token_ids += output
    return seq


def gpu_sampler(vocab_size, num_places=64, tiling=SMALL):
    return GpuSampler(torch.zeros(num_places, dtype=torch.int64), vocab_size, tiling)


def run(sampler, logits, seqs, places=None) -> Sampled:
    rows = list(range(len(seqs)))
    return sampler.launch(logits.clone(), seqs, rows, rows if places is None else places).read()


def reference(logits, makers) -> Sampled:
    """The torch path, on sequences of its own."""
    return launch_sampling(logits.clone(), [make_one() for make_one in makers]).read()


def kept_by_definition(weights, sampling):
    """Weights as the filters leave them, in fp64, one row: sorted by weight, then id."""
    top_k, top_p, min_p = sampling.get("top_k", 0), sampling.get("top_p", 1.0), sampling.get("min_p", 0.0)
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))[: top_k or None]
    total, mass, kept = math.fsum(weights[i] for i in order), 0.0, np.zeros(len(weights))
    for place, token in enumerate(order):
        if place and ((top_p < 1 and mass >= top_p * total) or weights[token] < min_p * weights[order[0]]):
            break
        kept[token] = weights[token]
        mass += weights[token]
    return kept


def draws_off(logits, sampling, tiling=SMALL, num_draws=40):
    """Draws that are not the inverse-CDF lookup by definition, beyond rounding."""
    vocab_size = logits.shape[-1]
    seqs = [make(seed=seed, **sampling) for seed in range(num_draws)]
    tokens = run(gpu_sampler(vocab_size, num_draws, tiling), logits.expand(num_draws, -1), seqs).tokens
    temperature = np.float32(sampling.get("temperature", 1.0))
    relative = (logits - logits.max()).numpy() / temperature
    kept = kept_by_definition(np.exp(relative).astype(np.float64), sampling)
    ends = np.cumsum(kept)
    off = 0
    for seed, token in enumerate(tokens):
        target = uniform(seed, 0) * ends[-1]
        start = ends[token - 1] if token else 0.0
        off += not (kept[token] > 0 and start - NEAR * ends[-1] <= target <= ends[token] + NEAR * ends[-1])
    return off


RULES = [
    {}, {"top_k": 1}, {"top_k": 3}, {"top_k": 40}, {"top_k": 70}, {"top_k": 5000}, {"top_p": 1e-9}, {"top_p": 0.5},
    {"top_p": 0.95}, {"top_p": 0.9999}, {"min_p": 1.0}, {"min_p": 0.1}, {"min_p": 1e-6},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.3}, {"top_k": 300, "top_p": 0.8}, {"top_k": 200, "min_p": 0.2},
    {"top_p": 0.7, "min_p": 0.05}, {"temperature": 1e-4}, {"temperature": 100.0}, {"temperature": 100.0, "top_p": 0.3},
    {"temperature": 0.3, "top_p": 0.9},
]  # fmt: skip


def filter_cases():
    """Draws off the definition: flat and peaked rows, with ties, in vocabularies around the sizes of the tiles."""
    off = {}
    for vocab_size, spread in itertools.product([5, 63, 257, 1000], [0.0, 0.3, 3.0, 12.0]):
        g = torch.Generator().manual_seed(vocab_size)
        logits = (torch.randn(vocab_size, generator=g) * spread * 16).round() / 16  # many equal ones
        for rule in RULES:
            if vocab_size != 1000 and len(rule) == 1 and rule.get("top_k") in (3, 70):
                continue
            off[f"{vocab_size} tokens, spread {spread}, {rule}"] = draws_off(logits, rule, num_draws=12)
    return off


def main() -> None:
    json.dump(filter_cases(), sys.stdout)


if __name__ == "__main__":
    main()
