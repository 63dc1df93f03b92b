"""Experts that the aiter tests share, and runs behind transports."""

import functools
from typing import Any

import torch

from moe import MoeA2ABackend, MoeBackend
from moe.backends.aiter.backend import AiterBackend
from moe.check.reference import reference_moe
from moe.config import DispatchDtype, DispatchFormat
from moe.dispatch.deepep_settings import DeepepMode
from moe.dispatch.mori import MoriBuffer, MoriDispatcher, MoriSettings
from moe.formats import ExpertWeights
from tests.emulators.ranks import Rank
from tests.moe.backends import hostile
from tests.moe.dispatch import several_ranks
from tests.moe.moe_layers import PLAIN

H, I, LL_H = 256, 256, 2048
BACKEND = AiterBackend()
TOLERANCE = {"bf16": 1e-5, "fp8_block": 1e-3, "fp8_tensor": 1e-3, "mxfp4": 1e-3}


@functools.cache
def experts_of(name: str, hidden: int = H) -> ExpertWeights:
    return hostile.plain_experts(name, several_ranks.E, hidden, I)


def mori_dispatcher(
    rank: Rank, dispatch_dtype: DispatchDtype, fp8_dtype: torch.dtype = torch.float8_e4m3fn, **settings: Any
) -> MoriDispatcher:
    choice, shape = MoriSettings(max_dispatch_tokens=8, **settings), several_ranks.shape_of(rank, H)
    return MoriDispatcher(MoriBuffer(rank, choice, shape, dispatch_dtype, fp8_dtype=fp8_dtype))


def behind_mori(name: str, num_tokens: list[int], *buffer: Any, low_latency: bool = False, **settings: Any) -> float:
    """Worst error of a rank; `buffer` is what `mori_dispatcher` takes."""
    layout = DispatchFormat.MORI_LL if low_latency else DispatchFormat.MORI_NORMAL
    return _worst_error(
        MoeA2ABackend.MORI, layout, name, num_tokens, H,
        lambda rank, config: mori_dispatcher(rank, *buffer, low_latency=low_latency, **settings),
    )  # fmt: skip


def behind_deepep(mode: DeepepMode, name: str, num_tokens: list[int]) -> float:
    """Worst error of a rank."""
    hidden = LL_H if mode is DeepepMode.LOW_LATENCY else H
    return _worst_error(
        MoeA2ABackend.DEEPEP, mode.dispatch_formats[0], name, num_tokens, hidden,
        lambda rank, config: several_ranks.deepep(rank, mode, hidden),
    )  # fmt: skip


def _worst_error(
    a2a: MoeA2ABackend, layout: DispatchFormat, name: str, num_tokens: list[int], hidden: int, dispatcher_for: Any
) -> float:
    experts, inputs = experts_of(name, hidden), several_ranks.rank_inputs(num_tokens, hidden, torch.bfloat16)
    outputs = several_ranks.run_layer(
        experts, inputs, backend=MoeBackend.AITER, a2a=a2a, formats=(layout,), dispatcher_for=dispatcher_for,
        dtype=torch.bfloat16,
    )  # fmt: skip
    quantize = BACKEND.formats[name].activation_quant
    twin = functools.partial(reference_moe, experts=experts, activation=PLAIN, quantize_input=quantize)
    return several_ranks.worst_error(outputs, inputs, twin)
