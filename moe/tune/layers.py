"""Tunes the layers of one model while they load, or applies cached choices: keys, budget and cache.

`measure.py` measures and checks one tactic; `policy.py` decides what is measured and chosen.
"""

import importlib
import importlib.metadata
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moe.errors import MoeConfigError
from moe.formats import ExpertWeights
from moe.group import SINGLE_RANK, Group
from moe.registry import load_backend
from moe.runner import MoeRunner
from moe.topology import Topology
from moe.tune.cache import TuneKey, TuningCache
from moe.tune.library import LibraryTuner
from moe.tune.measure import Measurer
from moe.tune.policy import BUDGET_S, MAX_TOKEN_COUNTS, Tuning, kept_choice, should_autotune, tune
from moe.types import MoeQuantInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningSettings:
    """`is_on`: measure shapes that are not in the cache. Empty `token_counts`: neither measure nor read the cache."""

    is_on: bool = False
    cache_folder: Path | None = None
    token_counts: tuple[int, ...] = ()
    budget_s: float = BUDGET_S

    def __post_init__(self) -> None:
        if self.is_on and not self.token_counts:
            raise MoeConfigError("token_counts is empty: tuning needs the token counts to measure")
        _check_counts(self.token_counts)


def _check_counts(token_counts: Sequence[int]) -> None:
    if len(token_counts) > MAX_TOKEN_COUNTS or any(count < 1 for count in token_counts):
        raise MoeConfigError(
            f"token_counts is {tuple(token_counts)}: at most {MAX_TOKEN_COUNTS} counts, each at least 1"
        )


class LayerTuner:
    """All layers of one model on one rank. Layers of one shape are measured once; one budget serves them all."""

    def __init__(self, settings: TuningSettings, ranks: Group = SINGLE_RANK) -> None:
        self._settings, self._ranks = settings, ranks
        self._cache = TuningCache(settings.cache_folder)
        self._library = LibraryTuner(settings.cache_folder, ranks)
        self._left_s = settings.budget_s
        self._told: set[str] = set()

    def tuned(self, runner: MoeRunner, info: MoeQuantInfo, experts: ExpertWeights, topology: Topology) -> MoeQuantInfo:
        """`info` with cached tactics or, with `is_on`, newly measured ones. Arguments as for `tune_layer`."""
        settings = self._settings
        if not settings.is_on:
            if not settings.token_counts or not should_autotune(runner.backend, runner.a2a):
                return info
            self._library.read_kept(runner, info)
            return _with_kept(runner, info, _key(runner, experts, topology, settings.token_counts), self._cache,
                              self._ranks)  # fmt: skip
        if not _has_tactics(runner, info):
            if self._tuned_by_library(runner, info, experts, topology):
                return info
            self._tell_once(f"--tune: {runner.backend} with {experts.format_name} experts has nothing to tune")
            return info
        start = time.monotonic()
        info = tune_layer(
            runner, info, experts, topology=topology, token_counts=settings.token_counts, cache=self._cache,
            ranks=self._ranks, budget_s=self._left_s,
        )  # fmt: skip
        self._left_s = max(0.0, self._left_s - (time.monotonic() - start))
        return info

    def _tuned_by_library(
        self, runner: MoeRunner, info: MoeQuantInfo, experts: ExpertWeights, topology: Topology
    ) -> bool:
        if not should_autotune(runner.backend, runner.a2a):
            return False
        key = _key(runner, experts, topology, self._settings.token_counts)
        return self._library.tune(key, runner, info, experts, topology)

    def _tell_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.info(message)


def tune_layer(
    runner: MoeRunner,
    info: MoeQuantInfo,
    experts: ExpertWeights,
    *,
    topology: Topology,
    token_counts: Sequence[int],
    cache: TuningCache,
    ranks: Group = SINGLE_RANK,
    budget_s: float = BUDGET_S,
) -> MoeQuantInfo:
    """The same weights with the fastest correct tactic for each token count, from the cache if it has them.

    `info` is what the runner's backend prepared from `experts`, the canonical weights of this rank on its device. A
    tactic serves all token counts up to its own; the last one serves all larger counts too. New choices are stored.
    Returns `info` itself if the backend has nothing to tune.

    Raises:
        MoeConfigError: more than 8 token counts, or no tactic agrees with the reference.
    """
    _check_counts(token_counts)
    if not _has_tactics(runner, info):
        logger.info("%s with %s experts has nothing to tune", runner.backend, experts.format_name)
        return info
    key = _key(runner, experts, topology, token_counts)
    kept = _with_kept(runner, info, key, cache, ranks)
    if kept is not info:
        return kept
    backend = load_backend(runner.backend)
    measurer = Measurer(runner, info, experts, topology)
    start = time.monotonic()
    choice = tune(
        Tuning(
            key=key,
            propose=lambda num_tokens, measured: backend.tactics(info, runner.config, num_tokens, measured),
            measure=measurer.seconds,
            error=measurer.error,
            warm_up=measurer.warm_up,
        ),
        cache, ranks, budget_s=budget_s,
    )  # fmt: skip
    logger.info("tuned %s for %s experts of %d x %d in %.1f s, %d measurements: %s",
                runner.backend, experts.format_name, experts.hidden_size, experts.intermediate_size,
                time.monotonic() - start, measurer.num_measured, choice)  # fmt: skip
    if topology.device.type == "cuda":
        torch.cuda.empty_cache()  # free the scratch of the largest token count for the layers still to load
    return backend.with_choice(info, choice)


def _has_tactics(runner: MoeRunner, info: MoeQuantInfo) -> bool:
    return should_autotune(runner.backend, runner.a2a) and bool(
        load_backend(runner.backend).tactics(info, runner.config, 1, {})
    )


def _with_kept(runner: MoeRunner, info: MoeQuantInfo, key: TuneKey, cache: TuningCache, ranks: Group) -> MoeQuantInfo:
    """`info` with the cached choice, or `info` itself without one. Measures nothing."""
    choice = kept_choice(key, cache, ranks)
    if choice is None:
        return info
    try:
        return load_backend(runner.backend).with_choice(info, choice)
    except MoeConfigError as error:  # a damaged file, the same for all ranks since rank 0's choice counts
        logger.warning("kept tactics of %s are not used: %s", runner.backend, error)
        cache.forget(key)
        return info


def _key(runner: MoeRunner, experts: ExpertWeights, topology: Topology, token_counts: Sequence[int]) -> TuneKey:
    versions = [("torch", str(torch.__version__))]
    package = load_backend(runner.backend).package
    if package is not None:
        versions.append((package, str(importlib.import_module(package).__version__)))
    return TuneKey(
        gpu=torch.cuda.get_device_name(topology.device) if topology.device.type == "cuda" else topology.device.type,
        library_versions=(*versions, _own_version()),
        backend=runner.backend,
        a2a=runner.a2a,
        format_name=experts.format_name,
        tp_size=topology.tp_size,
        ep_size=topology.ep_size,
        num_local_experts=runner.config.num_local_experts,
        hidden_size=runner.config.hidden_size,
        intermediate_size=runner.config.intermediate_size,
        top_k=runner.config.top_k,
        token_counts=tuple(sorted(set(token_counts))),
    )


def _own_version() -> tuple[str, str]:
    """Our own name and version: kernels and plans change with releases."""
    try:
        return "moe-serve", importlib.metadata.version("moe-serve")
    except importlib.metadata.PackageNotFoundError:
        return "moe-serve", "unreleased"
