"""From a checkpoint's tensors to dense tensors on the device, with shapes checked against config.json beforehand.

A family states each tensor once, as a `TensorSpec`: the same list checks the headers before anything is read, and gives
`--load-format dummy` its shapes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from loaders.quant import PLAIN_DTYPES, inspect_linear, read_linear
from loaders.source import TensorSource
from model.config import UnsupportedModelError

_FP8_BLOCK = 128
_NVFP4_GROUP = 16


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor the model needs. `keys`: the config.json keys its shape comes from, for messages.

    `is_linear`: `name` is the prefix of a linear layer that may be stored in any format, `shape` its [N, K].
    `dtype`: what a published checkpoint holds, for linear layers the dtype of their data.
    `is_fp32`: a linear layer that is kept in fp32 whatever the model's dtype.
    """

    name: str
    shape: tuple[int, ...]
    keys: str
    is_linear: bool = False
    dtype: torch.dtype = torch.bfloat16
    is_fp32: bool = False


def check_shapes(source: TensorSource, specs: Iterable[TensorSpec]) -> None:
    """Compare headers with the specs; reads no weight.

    Raises:
        CheckpointError: (of the loaders) a tensor is missing or half a scale set.
        UnsupportedModelError: a shape that contradicts config.json (names tensor and config keys), or a bias where
            this architecture has none (names the tensor).
    """
    specs = list(specs)
    known = {spec.name for spec in specs}
    for spec in specs:
        shape: tuple[int, ...]
        if spec.is_linear:
            _refuse_unknown_bias(source, spec.name, known)
            layout = inspect_linear(source, spec.name)
            meta, shape = layout.weight, layout.shape
        else:
            meta = source.meta(spec.name)
            shape = meta.shape
        if shape != spec.shape:
            raise UnsupportedModelError(
                f"{meta.where}: its shape is {list(shape)}, but {spec.keys} in config.json make it {list(spec.shape)}"
            )


def _refuse_unknown_bias(source: TensorSource, prefix: str, known: set[str]) -> None:
    bias = f"{prefix}.bias"
    if bias in source and bias not in known:
        raise UnsupportedModelError(
            f"{source.meta(bias).where}: the model has no bias here and would ignore it; "
            "the checkpoint is of another architecture"
        )


def dummy_shapes(specs: Iterable[TensorSpec]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every stored tensor of a published checkpoint, scales included, by name."""
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for spec in specs:
        if not spec.is_linear:
            shapes[spec.name] = (spec.dtype, spec.shape)
            continue
        num_rows, num_cols = spec.shape
        weight = f"{spec.name}.weight"
        if spec.dtype == torch.uint8:  # NVFP4
            shapes[weight] = (torch.uint8, (num_rows, num_cols // 2))
            shapes[f"{weight}_scale"] = (torch.float8_e4m3fn, (num_rows, num_cols // _NVFP4_GROUP))
            shapes[f"{weight}_scale_2"] = (torch.float32, ())
            shapes[f"{spec.name}.input_scale"] = (torch.float32, ())
        else:
            shapes[weight] = (spec.dtype, spec.shape)
        if spec.dtype == torch.float8_e4m3fn:
            grid = (-(-num_rows // _FP8_BLOCK), -(-num_cols // _FP8_BLOCK))
            shapes[f"{weight}_scale_inv"] = (torch.float32, grid)
    return shapes


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reads tensors to `device`; matrices are dequantized once, from the stored bytes, to `dtype`."""

    source: TensorSource
    device: torch.device
    dtype: torch.dtype

    def matrix(self, prefix: str) -> torch.Tensor:
        """Dense [N, K] of a linear layer, whatever its format."""
        return read_linear(self.source, prefix).to(self.device).dequantize(self.dtype)

    def matrix_and_bias(self, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with its bias [N]."""
        return self.matrix(prefix), self.vector(f"{prefix}.bias", self.dtype)

    def vector(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A plain tensor: norm weights, biases, sinks; fp32 unless the caller wants the model's dtype."""
        self.source.expect(name, dtypes=PLAIN_DTYPES)
        return self.source.tensor(name).to(self.device, dtype)
