"""Engine process that lays out the weights of MoE layer 1 wrongly: gate and up trade places."""

from typing import Any

import torch

from engine.worker import main
from moe.backends.torch.backend import TorchBackend

_prepare = TorchBackend.prepare
_layers: list[Any] = []


def prepare(self: TorchBackend, experts: Any, config: Any, topology: Any) -> Any:
    """Layer 1's halves swapped, all others as they are."""
    _layers.append(experts)
    if len(_layers) == 2:
        half = experts.intermediate_size
        rows = torch.cat((torch.arange(half, 2 * half), torch.arange(half)))
        w13 = type(experts.w13)(experts.w13.codes[:, rows], experts.w13.scales[:, rows])
        experts = type(experts)(w13=w13, w2=experts.w2, b13=experts.b13, b2=experts.b2)
    return _prepare(self, experts, config, topology)


if __name__ == "__main__":
    TorchBackend.prepare = prepare  # type: ignore[method-assign]
    main()
