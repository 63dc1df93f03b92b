"""Small plain tensors: refused where a value is NaN or infinite.

Such a value in a router weight or its correction bias only means that an expert is never chosen, so every answer would
be a little wrong and no check would see it. Large matrices are not looked at: that would take a pass over all bytes.
"""

import math

import torch

from loaders.errors import CheckpointError
from loaders.source import TensorMeta


def finite_values(values: torch.Tensor, meta: TensorMeta, *, may_be_masked: bool = False) -> torch.Tensor:
    """Router weights, biases, norms or sinks, unchanged. `meta` is that of the whole tensor that they are from.

    `may_be_masked`: -inf is a number too, since it has a meaning: no sink, or an expert that is never chosen.

    Raises:
        CheckpointError: one is NaN or infinite; names file and tensor.
    """
    is_good = torch.isfinite(values)
    if may_be_masked:
        is_good |= values == -math.inf
    if not bool(is_good.all()):
        bad = values[~is_good].flatten()[0].item()
        raise CheckpointError(
            f"{meta.where}: its values must be finite numbers, found {bad}; the file is damaged, or its export went "
            "wrong: download it again, or take another upload of the model"
        )
    return values
