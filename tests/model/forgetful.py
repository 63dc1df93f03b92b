"""Requests of a sliding layer that keep only the pages which their next tokens see, in any implementation of attention.

Started as a program, it runs the Triton kernels in Triton's interpreter and prints each case's largest error as JSON.
"""

import json
import sys
from dataclasses import replace

import torch

from model.attention import tiles
from model.attention import triton as triton_attention
from model.attention.base import AttentionSpec, make_attention
from tests.model.attention_cases import GQA, MLA, Requests, Sequence, Step, worst_error

STEPS = [{"a": 5, "b": 31}, {"a": 1, "b": 1}, {"a": 13, "b": 20}, {"a": 1, "b": 3}, *[{"a": 1, "b": 1}] * 6]
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
CASES = {
    "window 9, pages of 4": (replace(GQA, window=9), 4),
    "window 8, pages of 8": (replace(GQA, window=8), 8),
    "window 1, pages of 1": (replace(GQA, window=1), 1),
    "latents, window 9, pages of 4": (replace(MLA, window=9), 4),
}


class Forgetful(Requests):
    """Pages below every window hold NaN before each step, and the table names a page of NaN in their place.

    The batch is that of a model with both kinds of layers: slots and pages of its full layers point at NaN, too.
    """

    def __init__(self, spec: AttentionSpec, sequences: dict[str, Sequence], page_size: int) -> None:
        super().__init__(spec, sequences, SINKS, page_size)
        self.hole = self.cache.free.pop()
        self.num_forgotten = 0

    def step(self, counts: dict[str, int]) -> Step:
        """The next tokens; what they do not see is gone."""
        firsts = [self._forget(name) for name in counts]
        step = super().step(counts)
        table = step.batch.page_table_BP.clone()
        for row, first in enumerate(firsts):
            table[row, :first] = self.hole
        sliding = replace(step.batch, page_table_BP=table)
        full = replace(
            step.batch,
            slots_T=torch.full_like(step.batch.slots_T, self.hole * self.cache.page_size),
            page_table_BP=torch.full_like(table, self.hole),
            sliding=sliding,
        )
        return replace(step, batch=full)

    def _forget(self, name: str) -> int:
        """Poison the request's pages that its next token does not see; returns how many those are."""
        size, window = self.cache.page_size, self.spec.window
        assert window is not None
        first = max(0, self.cache.lengths.get(name, 0) - window + 1) // size
        for page in self.cache.pages.get(name, [])[:first]:
            self.num_forgotten += 1
            for tensor in (self.cache.layers[0].keys, self.cache.layers[0].values):
                tensor[page * size : (page + 1) * size] = float("nan")
        return first


def errors(backend: str) -> dict[str, float]:
    """Largest error of each case; infinite where a page that is gone was read."""
    found = {}
    for name, (spec, page_size) in CASES.items():
        lengths = {request: sum(step.get(request, 0) for step in STEPS) for request in "ab"}
        sequences = {n: Sequence(spec, length, seed, SINKS) for seed, (n, length) in enumerate(lengths.items())}
        requests = Forgetful(spec, sequences, page_size)
        found[name] = worst_error(make_attention(backend, [spec], torch.device("cpu")), requests, STEPS)
        assert requests.num_forgotten > 10
    return found


def main() -> None:
    triton_attention._PREFILL_IN_WINDOW = replace(triton_attention._PREFILL_IN_WINDOW, rows=32, keys=16)
    triton_attention._DECODE = replace(triton_attention._DECODE, keys=16)
    tiles.LATENT_FP32 = replace(tiles.LATENT_FP32, rows=16, keys=16)
    json.dump(errors("triton"), sys.stdout)


if __name__ == "__main__":
    main()
