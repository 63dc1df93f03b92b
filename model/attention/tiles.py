"""Tiles of the Triton attention kernels, and which of them latent attention (MLA) takes. Launches nothing."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Tile of one program: `rows` is queries times heads, `keys` the keys per iteration of its loop.

    `per_processor`: programs that decodes are cut into for each processor, where there are too few requests.
    """

    rows: int = 0
    keys: int
    warps: int
    stages: int
    per_processor: int = 2


# On Hopper the smallest tile of its matrix instructions, which fills a processor's shared memory; the others fit into
# the 99 KiB of consumer GPUs. fp32 numbers take twice the memory, and their products no matrix unit.
#
# Hopper's are listed by the rows up to which they serve: requests times heads of a step's decodes. The first that
# serves enough is taken, and the last serves prompts too. `benchmarks/sweep_latent.py --few` measures candidates.
LATENT_ON_HOPPER: tuple[tuple[float, Tile], ...] = (
    (256, Tile(rows=16, keys=64, warps=8, stages=2, per_processor=1)),
    (math.inf, Tile(rows=64, keys=64, warps=8, stages=2, per_processor=1)),
)
_LATENT = Tile(rows=32, keys=32, warps=4, stages=2)
_LATENT_FP8 = Tile(rows=32, keys=32, warps=8, stages=2)  # converting takes registers, and four warps would spill
LATENT_FP32 = Tile(rows=16, keys=16, warps=8, stages=1)


def latent_tile(
    dtype: torch.dtype, kv_dtype: torch.dtype, capability: tuple[int, int], num_rows: float = math.inf
) -> Tile:
    """The tile for queries and a cache of these dtypes; uint8 stands for FP8.

    `num_rows`: requests times heads of a step's decodes; infinite for prompts.
    """
    if torch.float32 in (dtype, kv_dtype):
        return LATENT_FP32
    if kv_dtype == torch.uint8:
        return _LATENT_FP8
    if capability[0] != 9:
        return _LATENT
    return next(tile for most_rows, tile in LATENT_ON_HOPPER if num_rows <= most_rows)
