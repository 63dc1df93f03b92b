"""Tactics of FlashInfer's `cutlass_fused_moe`: a profile number for each GEMM, passed with every call.

Without numbers the library uses the first profile of both lists for any number of tokens (for MXFP4 on SM90 a tile of
64 weight rows by 16 tokens), unless its own autotuner ran in the same process. Numbers passed with the call need no
tuning context, work inside CUDA graphs and can be stored on disk. They are valid for one release of the library only.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from moe.backend import Tactic, TacticTable
from moe.backends.flashinfer import common
from moe.errors import MoeConfigError
from moe.topology import Topology

Pair = tuple[int, int]
_PAIR = re.compile(r"(-1|[0-9]{1,9})/(-1|[0-9]{1,9})")
_UNTUNED = -1  # the library's own word for "the first"


@dataclass(frozen=True, slots=True)
class Profiles:
    """Profile numbers by token count, smallest bound first; the last pair serves all counts above too."""

    steps: tuple[tuple[int, Pair], ...] = ()

    def pick(self, num_tokens: int) -> Pair | None:
        """The pair of the first bound >= `num_tokens`; None if nothing was chosen."""
        if not self.steps:
            return None
        return next((pair for bound, pair in self.steps if num_tokens <= bound), self.steps[-1][1])

    def arguments(self, num_tokens: int) -> dict[str, object]:
        """Extra arguments of the call. The fused reduction stays off, because its order of addition varies."""
        pair = self.pick(num_tokens)
        return {} if pair is None else {"profile_ids": list(pair), "use_fused_finalize": False}


class CutlassWeights(Protocol):
    """The fields of a quant info that the list of profiles depends on."""

    @property
    def w13(self) -> torch.Tensor:
        """As the kernel reads it."""

    @property
    def w2(self) -> torch.Tensor:
        """As the kernel reads it."""

    @property
    def topology(self) -> Topology:
        """Device and ranks."""


NO_PROFILES = Profiles()


def profiles_of(choice: TacticTable) -> Profiles:
    """The chosen pairs.

    Raises:
        MoeConfigError: a tactic is not a pair of numbers.
    """
    return Profiles(tuple((count, _pair(choice[str(count)])) for count in sorted(map(int, choice))))


def _text(first: int, second: int) -> Tactic:
    return f"{first}/{second}"


def _pair(text: Tactic) -> Pair:
    numbers = _PAIR.fullmatch(text)
    if numbers is None:
        raise MoeConfigError(f"{text!r} is no pair of profile numbers")
    return int(numbers[1]), int(numbers[2])


def proposals(lists: tuple[Sequence[int], Sequence[int]], measured: Mapping[Tactic, float]) -> list[Tactic]:
    """The untuned pair and every profile of the first GEMM; then the best of those with every profile of the second.

    The times of the two GEMMs add up, so the best profiles of each are the best pair.
    """
    if not any(lists):
        return []
    first = [_text(_UNTUNED, _UNTUNED), *(_text(number, _UNTUNED) for number in lists[0] if number > 0)]
    missing = [tactic for tactic in first if tactic not in measured]
    if missing:
        return missing
    best = min(first, key=lambda tactic: measured.get(tactic, math.inf))
    second = [_text(_pair(best)[0], number) for number in lists[1]]
    return [tactic for tactic in second if tactic not in measured]


def profile_lists(info: CutlassWeights, x_dtype: torch.dtype, top_k: int, *, w4_group_scaling: bool = False) -> tuple[
    list[int], list[int]
]:  # fmt: skip
    """Profile numbers of each GEMM that the installed release can run on `info.w13` and `info.w2`.

    Both lists are empty if the release has no argument for them.
    """
    core = common.library("fused_moe.core")
    if not common.takes(core.cutlass_fused_moe, "profile_ids"):
        return [], []
    topology = info.topology
    module = core.get_cutlass_fused_moe_module(common.device_arch(topology.device).removeprefix("sm"))
    runner = module.MoERunner(
        x_dtype=x_dtype, weight_dtype=info.w13.dtype, output_dtype=torch.bfloat16, top_k=top_k,
        tp_size=topology.tp_size, tp_rank=topology.tp_rank, ep_size=topology.ep_size, ep_rank=topology.ep_rank,
        cluster_size=1, cluster_rank=0, enable_alltoall=False, use_deepseek_fp8_block_scale=False,
        use_w4_group_scaling=w4_group_scaling, use_mxfp8_act_scaling=False, min_latency_mode=False, enable_pdl=False,
        activation_type=core.ActivationType.Swiglu, use_packed_weights=False, use_fused_finalize=False,
        use_wfp4afp8_humming=False,
    )  # fmt: skip
    x_1H = torch.empty(1, info.w2.shape[1], dtype=x_dtype, device=topology.device)

    def numbers(gemm: int) -> list[int]:
        runner.gemm_idx_for_tuning = gemm
        found = runner.get_valid_tactics([x_1H, info.w13, None, info.w2, None], None)
        return [int(number) for number in found if int(number) != _UNTUNED]

    return numbers(1), numbers(2)
