"""Policy of tuning: what is tuned, on which shapes, who decides and when a result is kept. Knows no kernel library.

Tuning chooses tactics inside one backend, on the local shape after dispatch and with the transport left out, so no rank
waits for another inside a measurement. All ranks tune in step if any misses its cache; the slowest rank's time counts;
rank 0 decides, tells the others and writes.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from moe.backends.flashinfer_cutedsl import is_flashinfer_cutedsl_v1_path
from moe.config import DispatchFormat, MoeA2ABackend, MoeBackend, MoeRunnerConfig
from moe.errors import MoeConfigError
from moe.runner import MoeRunner
from moe.topology import Topology
from moe.tuning_cache import Choice, Tactic, TuneKey, TuningCache
from moe.types import (
    DeepepLlDispatchOutput,
    DispatchOutput,
    FlashinferDispatchOutput,
    StandardDispatchOutput,
    StandardTopK,
)

T = TypeVar("T")
logger = logging.getLogger(__name__)

_TUNABLE = (
    MoeBackend.FLASHINFER_MXFP4,
    MoeBackend.FLASHINFER_CUTLASS,
    MoeBackend.FLASHINFER_CUTEDSL,
    MoeBackend.FLASHINFER_TRTLLM,
    MoeBackend.TRITON,
)


def should_autotune(backend: MoeBackend, a2a: MoeA2ABackend) -> bool:
    """False for backends without tactics, and for cutedsl v1, whose masked kernel has none to choose from."""
    return backend in _TUNABLE and not is_flashinfer_cutedsl_v1_path(backend, a2a)


def tuning_token_counts(max_num_batched_tokens: int, max_num_seqs: int) -> tuple[int, ...]:
    """Powers of two up to the largest step, the largest decode batch and the largest step themselves.

    Give the scheduler's own limits: a tactic must exist for every step it can make, and none beyond is measured.
    """
    if not 1 <= max_num_seqs <= max_num_batched_tokens:
        raise MoeConfigError(
            f"max_num_seqs is {max_num_seqs}: it must lie between 1 and max_num_batched_tokens {max_num_batched_tokens}"
        )
    powers = {1 << exponent for exponent in range(max_num_batched_tokens.bit_length())}
    return tuple(sorted(powers | {max_num_seqs, max_num_batched_tokens}))


class Ranks(Protocol):
    """What the ranks of one group say to each other while tuning. Every rank makes the same calls."""

    @property
    def rank(self) -> int:
        """This rank."""

    def largest(self, values: list[float]) -> list[float]:
        """Element by element over all ranks."""

    def from_first(self, value: T) -> T:
        """Rank 0's value."""


class OneRank:
    """A group of one."""

    rank = 0

    def largest(self, values: list[float]) -> list[float]:
        """The values."""
        return values

    def from_first(self, value: T) -> T:
        """The value."""
        return value


class TorchRanks:
    """A torch process group that can move CPU tensors (gloo)."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank: int = torch.distributed.get_rank(group)

    def largest(self, values: list[float]) -> list[float]:
        """By all-reduce."""
        tensor = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return [float(value) for value in tensor]

    def from_first(self, value: T) -> T:
        """By broadcast."""
        box = [value]
        torch.distributed.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """One layer's tuning: `measure(tactic, num_tokens)` gives seconds, `error(tactic, num_tokens)` the relative error
    against the twin. Both run this rank's experts alone.
    """

    key: TuneKey
    tactics: Sequence[Tactic]
    measure: Callable[[Tactic, int], float]
    error: Callable[[Tactic, int], float]
    tolerance: float

    def __post_init__(self) -> None:
        if not self.tactics:
            raise MoeConfigError(f"--moe-backend {self.key.backend} names no tactics to tune")


def kept_choice(key: TuneKey, cache: TuningCache, ranks: Ranks) -> Choice | None:
    """Rank 0's kept choice if every rank has one, else None on every rank. Measures nothing."""
    kept = cache.load(key)
    anyone_misses = ranks.largest([float(kept is None)])[0] > 0
    return None if anyone_misses else ranks.from_first(kept)


def tune(tuning: Tuning, cache: TuningCache, ranks: Ranks) -> Choice:
    """The kept choice, or a new one measured by all ranks in step and written by rank 0.

    Raises:
        MoeConfigError: no tactic computes what the twin computes, at one of the shapes.
    """
    kept = kept_choice(tuning.key, cache, ranks)
    if kept is not None:
        return kept
    choice = {str(num_tokens): _best(tuning, num_tokens, ranks) for num_tokens in tuning.key.token_counts}
    if ranks.rank == 0:
        cache.store(tuning.key, choice)
    return choice


def _best(tuning: Tuning, num_tokens: int, ranks: Ranks) -> Tactic:
    """Fastest on the slowest rank, if it is right on every rank; else the next."""
    seconds = ranks.largest([tuning.measure(tactic, num_tokens) for tactic in tuning.tactics])
    order = sorted(range(len(seconds)), key=seconds.__getitem__)
    for index in ranks.from_first(order):
        tactic = tuning.tactics[index]
        error = tuning.error(tactic, num_tokens)
        worst = ranks.largest([math.inf if math.isnan(error) else error])[0]
        if worst <= tuning.tolerance:
            return tactic
        if ranks.rank == 0:
            logger.warning(
                "%s: tactic %s is off by %.3g at %d tokens and is not used",
                tuning.key.backend,
                tactic,
                worst,
                num_tokens,
            )
    raise MoeConfigError(
        f"--moe-backend {tuning.key.backend}: no tactic stays within {tuning.tolerance} at {num_tokens} tokens"
    )


def local_input(
    dispatch_format: DispatchFormat, num_tokens: int, config: MoeRunnerConfig, topology: Topology
) -> DispatchOutput:
    """Tokens as a transport would have left them on this rank, made here: same layout, shapes and dtypes.

    `num_tokens` counts rows that reach this rank. Ids visit the local experts in turn.
    """
    g = torch.Generator().manual_seed(num_tokens)
    device, num_local, top_k = topology.device, config.num_local_experts, config.top_k

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(device, config.dtype)

    slots = torch.arange(num_tokens * top_k, device=device).view(num_tokens, top_k)
    ids = (topology.expert_range(config.num_experts).start + slots % num_local).to(torch.int32)
    weights = torch.full((num_tokens, top_k), 1.0 / top_k, device=device)
    if dispatch_format is DispatchFormat.STANDARD:
        return StandardDispatchOutput(random(num_tokens, config.hidden_size), StandardTopK(weights, ids))
    if dispatch_format is DispatchFormat.FLASHINFER:
        return FlashinferDispatchOutput(random(num_tokens, config.hidden_size), StandardTopK(weights, ids))
    if dispatch_format is DispatchFormat.DEEPEP_LL:
        rows = -(-num_tokens // 4) * 4
        per_expert = -(-num_tokens // num_local)
        counts = torch.full((num_local,), per_expert, dtype=torch.int32, device=device)
        x_EMH = random(num_local, rows, config.hidden_size)
        return DeepepLlDispatchOutput(x_EMH, None, ids.to(torch.int64), weights, counts, per_expert)
    raise MoeConfigError(f"no backend with tactics takes the dispatch format {dispatch_format}")


def run_locally(
    runner: MoeRunner, quant_info: Any, dispatch_format: DispatchFormat, num_tokens: int, topology: Topology
) -> torch.Tensor:
    """One pass of the experts over `local_input`; neither dispatch nor combine is called."""
    dispatched = local_input(dispatch_format, num_tokens, runner.config, topology)
    return runner.run(dispatched, quant_info).hidden_states
