"""`DummyCheckpoint`: a source with random contents of given shapes, for `--load-format dummy`. Reads no file.

Contents are made when asked for, directly on the target device, and depend only on seed, name and device type.
Dequantized weights have a standard deviation near 0.02, so activations neither explode nor vanish.
"""

import zlib
from collections.abc import Mapping

import torch

from loaders.errors import CheckpointError
from loaders.source import TensorMeta, TensorSource, dtype_name

_WEIGHT_STD = 0.02
_FP8_STD = 64.0  # of stored e4m3 values, well inside their range of 448
_FP4_STD = 2.93  # of uniformly random E2M1 codes
_NVFP4_BLOCK_SCALE = 64.0
_INPUT_SCALE = 0.02
_E8M0_LOW, _E8M0_HIGH = 119, 121  # exclusive: 2^-8 and 2^-7, times 2.93 near 0.02
_EIGHT_BYTES = 8


class DummyCheckpoint(TensorSource):
    """Random tensors by name, each the same every time it is asked for."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        *,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """`shapes` gives dtype and shape of every tensor under the name a real checkpoint would use."""
        metas = {name: TensorMeta(name, dtype, shape, "dummy weights") for name, (dtype, shape) in shapes.items()}
        super().__init__("dummy weights", metas)
        self._seed = seed
        self._device = device or torch.device("cpu")

    def _map(self, meta: TensorMeta) -> torch.Tensor:
        generator = torch.Generator(self._device)
        generator.manual_seed(zlib.crc32(f"{self._seed} {meta.name}".encode()))
        last = meta.name.rsplit(".", 1)[-1]
        is_scale = "scale" in last
        if meta.dtype == torch.float8_e8m0fnu or (meta.dtype == torch.uint8 and is_scale):
            exponents = torch.empty(meta.shape, dtype=torch.uint8, device=self._device)
            return exponents.random_(_E8M0_LOW, _E8M0_HIGH, generator=generator).view(meta.dtype)
        if meta.dtype in (torch.uint8, torch.int8):
            return self._random_bytes(meta, generator)
        if is_scale and meta.dtype.is_floating_point:
            return torch.full(meta.shape, self._scale_value(meta, last), device=self._device).to(meta.dtype)
        if not meta.dtype.is_floating_point:
            raise CheckpointError(f"{meta.where}: no dummy contents for dtype {dtype_name(meta.dtype)}")
        if "norm" in meta.name and last == "weight":
            return torch.ones(meta.shape, dtype=meta.dtype, device=self._device)
        is_fp8 = meta.dtype.itemsize == 1
        dtype = torch.bfloat16 if is_fp8 else meta.dtype
        normal = torch.randn(meta.shape, dtype=dtype, device=self._device, generator=generator)
        if is_fp8:
            return normal.mul_(_FP8_STD).clamp_(-448, 448).to(meta.dtype)
        return normal.mul_(_WEIGHT_STD)

    def tensor(self, name: str) -> torch.Tensor:
        """As in the base class, without its copy: contents are new each time."""
        return self.view(name)

    def _random_bytes(self, meta: TensorMeta, generator: torch.Generator) -> torch.Tensor:
        """Eight bytes per drawn number, which is several times faster than one."""
        words = torch.empty(-(-meta.nbytes // _EIGHT_BYTES), dtype=torch.int64, device=self._device)
        words.random_(-(2**63), None, generator=generator)
        return words.view(meta.dtype)[: meta.nbytes].view(meta.shape)

    def _scale_value(self, meta: TensorMeta, suffix: str) -> float:
        """One value for all scales of a kind: what makes the dequantized weights N(0, 0.02)."""
        if suffix == "input_scale":
            return _INPUT_SCALE
        if suffix == "weight_scale_2":
            return _WEIGHT_STD / (_FP4_STD * _NVFP4_BLOCK_SCALE)
        if meta.dtype == torch.float8_e4m3fn:
            return _NVFP4_BLOCK_SCALE
        return _WEIGHT_STD / _FP8_STD
