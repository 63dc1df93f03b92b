"""Cases of paged attention against a dense reference, for every implementation, device and dtype."""

import math
from dataclasses import dataclass, replace

import torch

from model.attention.base import Attention, AttentionSpec
from model.batch import ForwardBatch
from model.rope import rotate_
from tests.model.paged import PagedCache

GQA = AttentionSpec(num_heads=4, num_kv_heads=2, key_dim=8, value_dim=6, scale=8**-0.5)
SLIDING = replace(GQA, window=128)
MLA = AttentionSpec(num_heads=4, num_kv_heads=1, key_dim=12, value_dim=8, scale=0.3, values_in_keys=True)


def dense_reference(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One whole sequence, [n, heads, dim]; fp64, one head and query at a time."""
    out = torch.zeros(q.shape[0], spec.num_heads, spec.value_dim, dtype=torch.float64)
    for i in range(q.shape[0]):
        first = 0 if spec.window is None else max(0, i - spec.window + 1)
        for head in range(spec.num_heads):
            group = head // (spec.num_heads // spec.num_kv_heads)
            scores = k[first : i + 1, group].double() @ q[i, head].double() * spec.scale
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            probs = torch.softmax(scores, 0)
            out[i, head] = probs[: i + 1 - first] @ v[first : i + 1, group].double()
    return out


class Sequence:
    """A request with all its queries, keys and values drawn beforehand; `dtype` holds keys and values exactly."""

    def __init__(
        self,
        spec: AttentionSpec,
        length: int,
        seed: int,
        sinks: torch.Tensor | None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        self.q = torch.randn(length, spec.num_heads, spec.key_dim, generator=g)
        self.k = torch.randn(length, spec.num_kv_heads, spec.key_dim, generator=g).to(dtype).float()
        self.v = self.k[..., : spec.value_dim]
        if not spec.values_in_keys:
            self.v = torch.randn(length, spec.num_kv_heads, spec.value_dim, generator=g).to(dtype).float()
        self.want = dense_reference(spec, self.q, self.k, self.v, sinks)


@dataclass(frozen=True)
class Step:
    """One step's inputs and the rows that must come out."""

    batch: ForwardBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None
    want: torch.Tensor
    rotation: torch.Tensor | None = None


class Requests:
    """Requests over one paged cache, fed some tokens of each per step."""

    def __init__(
        self,
        spec: AttentionSpec,
        sequences: dict[str, Sequence],
        sinks: torch.Tensor | None,
        page_size: int = 16,
        is_rotated: bool = False,
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.is_rotated = is_rotated
        self._turns = torch.Generator().manual_seed(11)
        self.spec, self.sequences, self.sinks = spec, sequences, sinks
        self.cache = PagedCache([spec.kv_spec], num_pages=1024 // page_size, page_size=page_size, dtype=kv_dtype)

    def step(self, counts: dict[str, int]) -> Step:
        """The next `counts[name]` tokens of each request."""
        lengths = self.cache.lengths
        ranges = {n: range(lengths.get(n, 0), lengths.get(n, 0) + count) for n, count in counts.items()}
        batch = self.cache.batch({n: list(r) for n, r in ranges.items()})

        def rows(what: str) -> torch.Tensor:
            return torch.cat([getattr(self.sequences[n], what)[r.start : r.stop] for n, r in ranges.items()])

        values = None if self.spec.values_in_keys else rows("v")
        if not self.is_rotated:
            return Step(batch, rows("q"), rows("k"), values, rows("want"))
        turns = torch.randn(batch.num_tokens, 1, self.spec.key_dim // 2, generator=self._turns) * 3
        rotation = torch.polar(torch.ones_like(turns), turns)
        q, k = rows("q"), rows("k")
        for turned in (q, k):  # rotated back, so that rotating them gives the reference's q and k
            rotate_(turned, rotation.conj().resolve_conj())
        return Step(batch, q, k, values, rows("want"), rotation)


def worst_error(attention: Attention, requests: Requests, steps: list[dict[str, int]]) -> float:
    """Largest difference of any output number of any step from the reference; infinite where one is no number."""
    worst = 0.0
    for index, counts in enumerate(steps):
        step = requests.step(counts)
        plan = (attention.plan_for_graph if index % 2 else attention.plan)(step.batch)
        kv = requests.cache.layers[0]
        got = attention.run(requests.spec, plan, kv, step.q, step.k, step.v, requests.sinks, step.rotation)
        if not got.isfinite().all():
            return math.inf
        worst = max(worst, (got.double() - step.want).abs().max().item())
    return worst
