"""Random contents of tensors, made once: tensors take their bytes from pools, each from a place of its own.

So writing is as fast as the disk. A pool has a prime number of entries, so rows and experts that repeat a pool are cut
from it at ever different places. Dequantized weights have a standard deviation near 0.02, and every scale is finite and
above 0, so activations neither vanish nor explode.
"""

import zlib
from collections.abc import Iterator
from functools import cache

import torch

from tools.checkpoint_files.tensors import ITEM_BYTES, Tensor, Values

_NUM_ENTRIES = 16_777_213  # a prime below 2^24
_STD = 0.02
_FP8_STD = 64.0  # of stored e4m3 values, well inside their range of 448
_FP4_STD = 2.93  # of uniformly random E2M1 codes
_BLOCK_SCALE = 64.0  # of NVFP4, on average


def chunks(tensor: Tensor, max_bytes: int) -> Iterator[tuple[int, memoryview]]:
    """The tensor's contents: (place of the first byte within the tensor, bytes), each at most `max_bytes` long."""
    pool = _pool(tensor.values, tensor.dtype)
    size = ITEM_BYTES[tensor.dtype]
    place = zlib.crc32(_seed_of(tensor).encode()) % _NUM_ENTRIES * size
    done = 0
    while done < tensor.num_bytes:
        length = min(max_bytes, len(pool) - place, tensor.num_bytes - done)
        yield done, pool[place : place + length]
        done += length
        place = (place + length) % len(pool)


def _seed_of(tensor: Tensor) -> str:
    """What the contents depend on. Gate and up of one expert share their scalar scales, as ModelOpt writes them."""
    return tensor.name if tensor.shape else tensor.name.replace(".up_proj.", ".gate_proj.")


@cache
def _pool(values: Values, dtype: str) -> memoryview:
    """The bytes of `_NUM_ENTRIES` values."""
    generator = torch.Generator().manual_seed(values.value)
    made = _make(values, generator).to(_TORCH_DTYPES[dtype])
    return memoryview(made.view(torch.uint8).numpy()).cast("B")


_TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}


def _make(values: Values, generator: torch.Generator) -> torch.Tensor:
    """`_NUM_ENTRIES` values, before they are cast to the tensor's dtype."""
    if values in (Values.CODES, Values.E8M0_SCALE):
        low, high = (0, 256) if values is Values.CODES else (119, 121)  # 2^-8 and 2^-7, times 2.93 near 0.02
        return torch.randint(low, high, (_NUM_ENTRIES,), dtype=torch.uint8, generator=generator)
    if values in (Values.WEIGHT, Values.FP8_WEIGHT):
        normal = torch.randn(_NUM_ENTRIES, generator=generator)
        return normal * _STD if values is Values.WEIGHT else (normal * _FP8_STD).clamp(-448, 448)
    middle = {
        Values.NORM: 1.0,
        Values.FP8_BLOCK_SCALE: _STD / _FP8_STD,
        Values.NVFP4_BLOCK_SCALE: _BLOCK_SCALE,
        Values.NVFP4_TENSOR_SCALE: _STD / (_FP4_STD * _BLOCK_SCALE),
        Values.INPUT_SCALE: 0.02,
    }[values]
    return middle * (0.75 + 0.5 * torch.rand(_NUM_ENTRIES, generator=generator))
