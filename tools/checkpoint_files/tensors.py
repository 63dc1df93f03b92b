"""`Tensor`: one tensor of a checkpoint: how the file calls it, its dtype, its shape, and what its values are like."""

import math
from dataclasses import dataclass
from enum import Enum, auto

ITEM_BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}


class Values(Enum):
    """What a tensor's random values are like; `values.py` makes them."""

    WEIGHT = auto()  # normal around 0, small
    NORM = auto()  # near 1
    CODES = auto()  # packed FP4: every byte is one
    E8M0_SCALE = auto()
    FP8_WEIGHT = auto()
    FP8_BLOCK_SCALE = auto()
    NVFP4_BLOCK_SCALE = auto()
    NVFP4_TENSOR_SCALE = auto()
    INPUT_SCALE = auto()


@dataclass(frozen=True, slots=True)
class Tensor:
    """`dtype` is safetensors' label."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: Values

    @property
    def num_bytes(self) -> int:
        """Size of its data."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def weight(name: str, *shape: int) -> Tensor:
    """A plain bf16 tensor."""
    return Tensor(name, "BF16", shape, Values.WEIGHT)


def norm(name: str, size: int) -> Tensor:
    """A bf16 norm weight [size]."""
    return Tensor(name, "BF16", (size,), Values.NORM)
