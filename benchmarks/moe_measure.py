"""Measures one layer of `bench_moe`: every contender, every number of tokens, every kind of routing, as rows.

A contender that cannot be prepared, is wrong or breaks costs its own rows only; the reason goes to `failures`.
"""

import statistics
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import moe_contenders
from benchmarks.moe_cases import LayerCase, id_sets, random_experts
from benchmarks.moe_check import Expected, check, expect
from benchmarks.moe_contenders import Contender
from benchmarks.moe_timing import Timer, copies_needed
from moe.formats import ExpertWeights
from moe.routing import StandardTopK
from moe.tune.cache import TuningCache

FREE_SHARE = 0.7  # of the free memory, for copies; the rest is for activations
CHOICE_SETS = 4  # id sets on which a contender compares its own alternatives
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure of every layer. `tune_seconds`: per library and layer, 0 tunes nothing."""

    tokens: list[int]
    backends: list[str]
    kinds: list[str]
    num_sets: int
    tune_seconds: float
    seed: int


def routing_fields(case: LayerCase, format_name: str, kind: str, topks: list[StandardTopK]) -> Row:
    """What a row says about its id sets, which are all for the same number of tokens."""
    num_active = statistics.median(int(topk.ids.unique().numel()) for topk in topks)
    floor_us = round(case.floor_us(format_name, topks[0].ids.shape[0], num_active), 1)
    return {"routing": kind, "active_experts": num_active, "floor_us": floor_us}


def expect_random(case: LayerCase, experts: ExpertWeights, topk: StandardTopK, seed: int) -> Expected:
    """What the twin makes of random tokens, others for every number of them."""
    num_tokens, device = topk.ids.shape[0], topk.ids.device
    generator = torch.Generator(device).manual_seed(seed + num_tokens)
    x_TH = torch.randn(num_tokens, case.hidden_size, generator=generator, device=device).bfloat16()
    return expect(case, experts, x_TH, topk, generator)


def failure(model: str, format_name: str, backend: str, tokens: int | list[int] | None, reason: str) -> Row:
    """An entry of the document's failures; no tokens: all of them."""
    return {"model": model, "format": format_name, "backend": backend, "tokens": tokens, "reason": reason}


@dataclass(kw_only=True)
class LayerBench:
    """One layer in one number format on `device`."""

    case: LayerCase
    format_name: str
    settings: Settings
    device: torch.device
    failures: list[Row] = field(default_factory=list)
    _expected: dict[int, Expected] = field(default_factory=dict)
    _cache: TuningCache = field(default_factory=lambda: TuningCache(None))

    def rows(self) -> Iterator[Row]:
        """Rows as they are measured."""
        experts = random_experts(self.case, self.format_name, self.device, seed=0)
        for name in self.settings.backends:
            if self.format_name not in moe_contenders.FORMATS[name]:
                continue
            try:
                contender = self._prepare(name, experts)
            except Exception as error:
                self._failed(error, name)
                continue
            for num_tokens in self.settings.tokens:
                try:
                    yield from self._measure(contender, experts, num_tokens)
                except Exception as error:
                    self._failed(error, name, num_tokens)
            del contender
            torch.cuda.empty_cache()

    def _prepare(self, name: str, experts: ExpertWeights) -> Contender:
        contender = moe_contenders.prepare(name, self.case, experts, self.device)
        if self.settings.tune_seconds > 0:
            contender.tune(experts, self.settings.tokens, self._cache, self.settings.tune_seconds)
        torch.cuda.empty_cache()
        num_fitting = 1 + int(FREE_SHARE * torch.cuda.mem_get_info()[0] / contender.nbytes)
        contender.grow(min(self._num_copies(experts, min(self.settings.tokens)), num_fitting))
        return contender

    def _num_copies(self, experts: ExpertWeights, num_tokens: int) -> int:
        return copies_needed(experts.nbytes * self.case.active(num_tokens) / self.case.num_experts)

    def _expect(self, experts: ExpertWeights, num_tokens: int, topk: StandardTopK) -> Expected:
        if num_tokens not in self._expected:
            self._expected[num_tokens] = expect_random(self.case, experts, topk, self.settings.seed)
        return self._expected[num_tokens]

    def _measure(self, contender: Contender, experts: ExpertWeights, num_tokens: int) -> Iterator[Row]:
        """Check once, choose once, capture once; then time each kind of routing."""
        case, kinds = self.case, self.settings.kinds
        sets = {kind: id_sets(case, num_tokens, kind, self.device, self.settings.num_sets) for kind in kinds}
        expected = self._expect(experts, num_tokens, sets[kinds[0]][0])
        row: Row = {
            "model": case.model, "format": self.format_name, "tokens": num_tokens, "backend": contender.name,
            "error": check(contender, expected),
        }  # fmt: skip
        num_copies = min(self._num_copies(experts, num_tokens), len(contender.layers))
        staged = {kind: [contender.stage(topk) for topk in topks] for kind, topks in sets.items()}
        few = staged[kinds[0]][:CHOICE_SETS]
        contender.choose(lambda: Timer(contender, expected.x_TH, few, num_copies).us(few))
        timer = Timer(contender, expected.x_TH, few, num_copies)
        row |= {"plan": contender.plan(num_tokens), "tuned": contender.is_tuned(num_tokens)}
        for kind in kinds:
            fields = routing_fields(case, self.format_name, kind, sets[kind])
            yield row | fields | {"us": round(timer.us(staged[kind]), 2)}

    def _failed(self, error: Exception, name: str, num_tokens: int | None = None) -> None:
        reason = f"{type(error).__name__}: {str(error)[:400]}"
        where = traceback.extract_tb(error.__traceback__)[-1]
        print(f"{name} {num_tokens or ''}: {reason} ({where.filename}:{where.lineno})", flush=True)
        self.failures.append(failure(self.case.model, self.format_name, name, num_tokens, reason))
