"""The torch experts behind DeepEP's two layouts: pre-permutes for `moe.backends.torch.backend`, and nothing else.

Shape letters: R received tokens, K top-k, E local experts, M rows per expert, H hidden.
"""

import torch

from moe.backends.torch.backend import TorchCoreInput, TorchMoeQuantInfo
from moe.config import DispatchFormat, MoeBackend, MoeRunnerConfig
from moe.errors import UnsupportedPathError
from moe.layouts.expert_slots import masked_rows
from moe.registry import register_pre_permute
from moe.types import (
    DeepepLlDispatchOutput,
    DeepepNormalDispatchOutput,
    RunState,
)


def _refuse_scales(scale: torch.Tensor | None) -> None:
    if scale is not None:
        raise UnsupportedPathError("--moe-backend torch takes tokens in bf16, but the transport sent them quantized")


@register_pre_permute(DispatchFormat.DEEPEP_NORMAL, MoeBackend.TORCH)
def deepep_normal_to_torch(
    dispatched: DeepepNormalDispatchOutput, quant_info: TorchMoeQuantInfo, config: MoeRunnerConfig, state: RunState
) -> TorchCoreInput:
    """Received tokens carry local ids already. The core multiplies by the weights, which the combine does not."""
    del quant_info, config, state
    _refuse_scales(dispatched.hidden_states_scale)
    return TorchCoreInput(dispatched.hidden_states, dispatched.topk_ids, dispatched.topk_weights)


@register_pre_permute(DispatchFormat.DEEPEP_LL, MoeBackend.TORCH)
def deepep_ll_to_torch(
    dispatched: DeepepLlDispatchOutput, quant_info: TorchMoeQuantInfo, config: MoeRunnerConfig, state: RunState
) -> TorchCoreInput:
    """Every row becomes a token with one expert and weight 1; rows past the count get id -1 and are never read."""
    del quant_info, config, state
    _refuse_scales(dispatched.hidden_states_scale)
    x_EMH = dispatched.hidden_states
    return TorchCoreInput(x_EMH.flatten(0, 1), *masked_rows(dispatched.masked_m, x_EMH.shape[1]))
