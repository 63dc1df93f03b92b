"""Small plain tensors: refused where a value is NaN or infinite.

Such a value in a router weight or its correction bias only means that an expert is never chosen, so every answer would
be a little wrong and no check would see it. Large matrices are not looked at: that would take a pass over all bytes.
"""

import torch

from loaders.errors import CheckpointError
from loaders.source import TensorMeta


def finite_values(values: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Router weights, biases, norms or sinks, unchanged. `meta` is that of the whole tensor that they are from.

    Raises:
        CheckpointError: one is NaN or infinite; names file and tensor.
    """
    is_finite = torch.isfinite(values)
    if not bool(is_finite.all()):
        bad = values[~is_finite].flatten()[0].item()
        raise CheckpointError(
            f"{meta.where}: its values must be finite numbers, found {bad}; the file is damaged, or its export went "
            "wrong: download it again, or take another upload of the model"
        )
    return values
