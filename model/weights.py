"""From a checkpoint's tensors to dense tensors on the device, with shapes checked against config.json beforehand.

A family states each tensor once, as a `TensorSpec`: the same list checks the headers before anything is read, and gives
`--load-format dummy` its shapes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from loaders.finite import finite_values
from loaders.quant import COLUMNS, PLAIN_DTYPES, ROWS, inspect_linear, read_linear
from loaders.source import TensorSource
from model.config import UnsupportedModelError
from model.linear import LinearWeight
from moe.formats import FORMATS, Fp8BlockWeight
from moe.formats.mxfp4 import GROUP as MXFP4_GROUP
from moe.formats.nvfp4 import GROUP as NVFP4_GROUP
from moe.geometry import RankPlace

_FP8_BLOCK = 128
_ALONE = RankPlace()
_AXES = {"rows": ROWS, "columns": COLUMNS}


@dataclass(frozen=True, slots=True)
class Split:
    """How tensor-parallel ranks divide a tensor: along "rows" (its first axis) or "columns" (its last).

    Heads are whole units of `unit` elements, the same number on every rank; with `copies`, several ranks may have the
    same. `is_ragged`: as many whole scale blocks as fit, and fewer, or none, on the last ranks.
    """

    axis: Literal["rows", "columns"] = "rows"
    unit: int = 1
    copies: bool = False
    is_ragged: bool = False

    def span(self, name: str, size: int, block: int, place: RankPlace) -> range:
        """This rank's part of `size` elements, whose scale blocks have `block` elements.

        Raises:
            MoeConfigError: the ranks cannot share the units evenly.
        """
        if self.is_ragged:
            cut = place.cut(size, block)
            return range(cut.start, cut.start + cut.length)
        return place.share(f"the {self.axis} of '{name}'", size, self.unit, copies=self.copies)


RAGGED_ROWS, RAGGED_COLUMNS = Split(is_ragged=True), Split(axis="columns", is_ragged=True)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor the model needs. `keys`: the config.json keys its shape comes from, for messages.

    `is_linear`: `name` is the prefix of a linear layer that may be stored in any format, `shape` its [N, K].
    `dtype`, or for linear layers `format_name`: what the files hold by config.json, where no files can be asked.
    `is_fp32`: a linear layer that is kept in fp32 whatever the model's dtype.
    `split`: how tensor-parallel ranks divide it; None if every rank has the whole.
    `keeps_fp8`: a linear layer that is read by `WeightReader.linear`.
    """

    name: str
    shape: tuple[int, ...]
    keys: str
    is_linear: bool = False
    dtype: torch.dtype = torch.bfloat16
    format_name: str = "bf16"
    is_fp32: bool = False
    split: Split | None = None
    keeps_fp8: bool = False


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
    """Dtype and shape of every stored tensor, scales included, by name."""
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for spec in specs:
        if spec.is_linear:
            stored = _stored_parts(spec.format_name, *spec.shape)
            shapes |= {f"{spec.name}.{suffix}": part for suffix, part in stored.items()}
        else:
            shapes[spec.name] = (spec.dtype, spec.shape)
    return shapes


def _stored_parts(format_name: str, num_rows: int, num_cols: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of the tensors of a linear layer [N, K], by suffix."""
    codes = (torch.uint8, (num_rows, num_cols // 2))
    fp8, scalar = (torch.float8_e4m3fn, (num_rows, num_cols)), (torch.float32, ())
    match format_name:
        case "nvfp4":
            scales = (torch.float8_e4m3fn, (num_rows, num_cols // NVFP4_GROUP))
            return {"weight": codes, "weight_scale": scales, "weight_scale_2": scalar, "input_scale": scalar}
        case "mxfp4":
            return {"weight": codes, "weight_scale": (torch.uint8, (num_rows, num_cols // MXFP4_GROUP))}
        case "fp8_tensor":
            return {"weight": fp8, "weight_scale": scalar, "input_scale": scalar}
        case "fp8_block":
            grid = (-(-num_rows // _FP8_BLOCK), -(-num_cols // _FP8_BLOCK))
            return {"weight": fp8, "weight_scale_inv": (torch.float32, grid)}
        case _:
            return {"weight": (torch.bfloat16, (num_rows, num_cols))}


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reads tensors to `device`; matrices are dequantized once, from the stored bytes, to `dtype`.

    `place` is this rank's among the tensor-parallel ranks: `rows`, `columns` and `entries` give its part, in `unit`s
    (heads, say) that are not divided. A part is read in whole scale blocks and cut to size after dequantizing, so it
    equals a slice of the whole bit for bit. They raise MoeConfigError where the ranks cannot share the units evenly.

    `keeps_fp8`: `linear` leaves FP8 blocks as they are stored, where a part begins and ends between two.
    """

    source: TensorSource
    device: torch.device
    dtype: torch.dtype
    place: RankPlace = _ALONE
    keeps_fp8: bool = False

    def matrix(self, prefix: str) -> torch.Tensor:
        """Dense [N, K] of a linear layer, whatever its format; whole on every rank."""
        return read_linear(self.source, prefix).to(self.device).dequantize(self.dtype)

    def rows(self, prefix: str, unit: int = 1, *, copies: bool = False) -> torch.Tensor:
        """This rank's outputs of a linear layer, dense [N / tp, K]."""
        return self._part(prefix, Split("rows", unit, copies))

    def columns(self, prefix: str, unit: int = 1) -> torch.Tensor:
        """What multiplies this rank's inputs of a linear layer, dense [N, K / tp]; the ranks' products are summed."""
        return self._part(prefix, Split("columns", unit))

    def linear(self, prefix: str, split: Split | None = None) -> LinearWeight:
        """The whole of a linear layer, or this rank's part of it, in the form in which it multiplies."""
        layout = inspect_linear(self.source, prefix)
        is_fp8 = layout.format_name == Fp8BlockWeight.format_name and layout.shape[1] % 2 == 0
        keeps_fp8 = self.keeps_fp8 and is_fp8
        if split is None:
            weight = read_linear(self.source, prefix).to(self.device)
            return weight if keeps_fp8 and isinstance(weight, Fp8BlockWeight) else weight.dequantize(self.dtype)
        span, axis = self._span(prefix, split), _AXES[split.axis]
        if not keeps_fp8 or not is_between_blocks(span, layout.shape[axis]):
            return self._part(prefix, split)
        weight = read_linear(self.source, prefix, axis, span).to(self.device)
        return weight if isinstance(weight, Fp8BlockWeight) else weight.dequantize(self.dtype)

    def rows_and_bias(self, prefix: str, unit: int = 1, *, copies: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """`rows` and the same part of the bias, [N / tp]."""
        return self.rows(prefix, unit, copies=copies), self.entries(f"{prefix}.bias", unit, self.dtype, copies=copies)

    def columns_and_bias(self, prefix: str, unit: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """`columns` and a bias [N] that counts once in the sum: the stored one on the first rank, zeros elsewhere."""
        bias_N = self.vector(f"{prefix}.bias", self.dtype)
        return self.columns(prefix, unit), bias_N if self.place.tp_rank == 0 else torch.zeros_like(bias_N)

    def vector(self, name: str, dtype: torch.dtype = torch.float32, *, may_be_masked: bool = False) -> torch.Tensor:
        """A small plain tensor: norm weights, say; fp32 unless the caller wants the model's dtype. Its values are
        finite, or, if they `may_be_masked`, -inf.
        """
        meta = self.source.expect(name, dtypes=PLAIN_DTYPES)
        return finite_values(self.source.tensor(name), meta, may_be_masked=may_be_masked).to(self.device, dtype)

    def entries(
        self, name: str, unit: int = 1, dtype: torch.dtype = torch.float32, *,
        copies: bool = False, may_be_masked: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """This rank's part of a plain vector that goes with `rows`: biases, sinks. Values as in `vector`."""
        part = self._plain_part(name, Split("rows", unit, copies))
        return finite_values(part, self.source.meta(name), may_be_masked=may_be_masked).to(self.device, dtype)

    def embedding(self, name: str) -> tuple[torch.Tensor, int]:
        """This rank's rows of a plain matrix, and which is the first."""
        span = RAGGED_ROWS.span(name, self.source.meta(name).shape[0], 1, self.place)
        return self._plain_part(name, RAGGED_ROWS).to(self.device, self.dtype), span.start

    def _plain_part(self, name: str, split: Split) -> torch.Tensor:
        meta = self.source.expect(name, dtypes=PLAIN_DTYPES)
        span = split.span(name, meta.shape[0], 1, self.place)
        return self.source.view(name)[span.start : span.stop].clone()

    def _span(self, prefix: str, split: Split) -> range:
        layout = inspect_linear(self.source, prefix)
        block = FORMATS[layout.format_name].col_block  # of rows too: gate and up are cut like the columns of down
        return split.span(layout.weight.name, layout.shape[_AXES[split.axis]], block, self.place)

    def _part(self, prefix: str, split: Split) -> torch.Tensor:
        axis, span = _AXES[split.axis], self._span(prefix, split)
        weight = read_linear(self.source, prefix, axis, span)
        block = weight.row_block if axis == ROWS else weight.col_block
        dense = weight.to(self.device).dequantize(self.dtype)
        return dense.narrow(axis, span.start % block, len(span)).contiguous()


def is_between_blocks(span: range, size: int) -> bool:
    """Whether a part of an FP8 axis of `size` elements begins and ends where a block does."""
    return span.start % _FP8_BLOCK == 0 and (span.stop % _FP8_BLOCK == 0 or span.stop == size)
