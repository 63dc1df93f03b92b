"""Torch's own random numbers start from the same seed; cheap enough for every test and every row of a table."""

import functools

import torch


@functools.cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


def seed_torch() -> None:
    """As `torch.manual_seed(0)`, which seeds every kind of device.

    For each kind that is not in use yet it formats the stack of its caller and keeps it: 0.3 ms and more a call.
    """
    if _has_gpu():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)
