"""One linear layer's tensors to a canonical weight. Decides by dtype, shape and sibling scales, never by the config.

| weight dtype | siblings of `X.weight` | format |
| --- | --- | --- |
| f16, bf16, f32 | none | bf16 |
| f8_e4m3 | `weight_scale_inv` or `scale`, one number per 128 x 128 block (f32, bf16 or e8m0) | fp8_block |
| f8_e4m3 | scalar `weight_scale`, maybe `input_scale` | fp8_tensor |
| u8, i8 (packed FP4) | e4m3 `weight_scale` per 16, `weight_scale_2`, maybe `input_scale` | nvfp4 |
| u8, i8 (packed FP4) | any one scale per 32: e8m0, u8, or f32 powers of two | mxfp4 |
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from loaders.errors import CheckpointError
from loaders.quant_config import SUPPORTED_FORMATS
from loaders.scales import e4m3_scales, e8m0_scales, float_scales, read_scalar
from loaders.source import TensorMeta, TensorSource, dtype_name
from moe.formats import FORMATS, Bf16Weight, Fp8BlockWeight, Fp8TensorWeight, Mxfp4Weight, Nvfp4Weight, Weight
from moe.formats.fp8_block import BLOCK
from moe.formats.mxfp4 import GROUP as MXFP4_GROUP
from moe.formats.nvfp4 import GROUP as NVFP4_GROUP

PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS, COLUMNS = -2, -1
_FP4_DTYPES = (torch.uint8, torch.int8)
_SCALE_SUFFIXES = ("weight_scale_inv", "weight_scale", "scale")
_SIBLING_SUFFIXES = (*_SCALE_SUFFIXES, "weight_scale_2", "input_scale")
_FOREIGN_WEIGHTS = {"weight_packed": "compressed-tensors", "qweight": "GPTQ or AWQ", "weight.absmax": "bitsandbytes"}

Convert = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One stored tensor of a weight: an entry stands for `row_unit` rows and `col_unit` columns of elements."""

    meta: TensorMeta
    convert: Convert
    row_unit: int = 1
    col_unit: int = 1
    pad_value: int = 0

    def view(self, source: TensorSource, axis: int, span: range) -> torch.Tensor:
        """Entries for the elements `span` along rows (axis -2) or columns (-1), converted; mapped where possible."""
        unit = self.row_unit if axis == ROWS else self.col_unit
        entries = source.view(self.meta.name).narrow(axis, span.start // unit, -(-len(span) // unit))
        return self.convert(entries)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearLayout:
    """What the headers say about one linear layer, checked: format, [N, K], matrix parts, names of scalar scales."""

    format_name: str
    shape: tuple[int, int]
    parts: tuple[Part, ...]
    scale: str | None = None  # per-tensor scale: `weight_scale` of fp8_tensor, `weight_scale_2` of nvfp4
    input_scale: str | None = None

    @property
    def weight(self) -> TensorMeta:
        """The tensor that holds the data or codes."""
        return self.parts[0].meta


def read_linear(source: TensorSource, prefix: str, axis: int = ROWS, span: range | None = None) -> Weight:
    """Weight [N, K] of the layer named `prefix`. A bias is a separate tensor: read it by name if you need it.

    With `span`, only these rows (axis -2) or columns (axis -1), widened on both sides to whole scale blocks; nothing
    else is read.

    Raises:
        CheckpointError: half a scale set, a wrong scale, a dtype or shape that fits no format; names file and tensor.
    """
    layout = inspect_linear(source, prefix)
    if span is None:
        parts = [part.convert(source.tensor(part.meta.name)) for part in layout.parts]
    else:
        size, kind = layout.shape[axis], FORMATS[layout.format_name]
        block = kind.row_block if axis == ROWS else kind.col_block
        blocks = range(span.start // block * block, min(size, -(-span.stop // block) * block))
        parts = [part.view(source, axis, blocks).clone(memory_format=torch.contiguous_format) for part in layout.parts]
    scalars = [None if name is None else read_scalar(source, name) for name in (layout.scale, layout.input_scale)]
    return build_weight(layout.format_name, parts, *scalars)


def build_weight(
    format_name: str, parts: list[torch.Tensor], scale: torch.Tensor | None, input_scale: torch.Tensor | None
) -> Weight:
    """The format's class around converted parts, in the order `LinearLayout.parts` has them."""
    if format_name == "bf16":
        return Bf16Weight(parts[0])
    if format_name == "mxfp4":
        return Mxfp4Weight(parts[0], parts[1])
    if format_name == "fp8_block":
        return Fp8BlockWeight(parts[0], parts[1])
    if scale is None:
        raise CheckpointError(f"{format_name} weights need a scale per tensor")
    if format_name == "fp8_tensor":
        return Fp8TensorWeight(parts[0], scale, input_scale)
    return Nvfp4Weight(parts[0], parts[1], scale, input_scale)


def inspect_linear(source: TensorSource, prefix: str) -> LinearLayout:
    """Find format and tensors of a layer from headers alone, and check that they fit together.

    Raises:
        CheckpointError: as `read_linear`.
    """
    name = f"{prefix}.weight"
    for suffix, maker in _FOREIGN_WEIGHTS.items():
        if f"{prefix}.{suffix}" in source:
            raise CheckpointError(
                f"{source.meta(f'{prefix}.{suffix}').where}: a format of {maker}, which is not supported "
                f"(supported: {SUPPORTED_FORMATS}); take another upload of the model"
            )
    found = (suffix for suffix in _SIBLING_SUFFIXES if f"{prefix}.{suffix}" in source)
    siblings = {suffix: source.meta(f"{prefix}.{suffix}") for suffix in found}
    if name not in source and siblings:
        raise CheckpointError(f"{next(iter(siblings.values())).where}: a scale without its weight '{name}'")
    weight = source.meta(name)
    shape = _matrix(weight)
    scales = [siblings[suffix] for suffix in _SCALE_SUFFIXES if suffix in siblings]
    if len(scales) > 1:
        raise CheckpointError(f"{weight.where}: two scales, '{scales[0].name}' and '{scales[1].name}'; one is expected")
    if weight.dtype in PLAIN_DTYPES:
        if siblings:
            scale = next(iter(siblings.values()))
            raise CheckpointError(f"{scale.where}: a scale for a weight that is plain {dtype_name(weight.dtype)}")
        return LinearLayout(format_name="bf16", shape=shape, parts=(Part(meta=weight, convert=_same),))
    if weight.dtype != torch.float8_e4m3fn and weight.dtype not in _FP4_DTYPES:
        raise CheckpointError(
            f"{weight.where}: expected bf16, f16, f32, float8_e4m3fn or packed FP4 (uint8, int8), "
            f"found {dtype_name(weight.dtype)}"
        )
    if not scales:
        raise CheckpointError(
            f"{weight.where}: {dtype_name(weight.dtype)} without a scale; expected one of "
            + ", ".join(f"'{prefix}.{suffix}'" for suffix in _SCALE_SUFFIXES)
        )
    if weight.dtype in _FP4_DTYPES:
        return _fp4_layout(weight, scales[0], siblings)
    return _fp8_layout(weight, scales[0], siblings)


def _fp8_layout(weight: TensorMeta, scale: TensorMeta, siblings: dict[str, TensorMeta]) -> LinearLayout:
    rows, cols = _matrix(weight)
    _refuse_sibling(weight, siblings, "weight_scale_2")
    data = Part(meta=weight, convert=_same)
    if "weight_scale" in siblings:
        _check_scalar(scale)
        input_scale = siblings.get("input_scale")
        if input_scale is not None:
            _check_scalar(input_scale)
        return LinearLayout(
            format_name="fp8_tensor",
            shape=(rows, cols),
            parts=(data,),
            scale=scale.name,
            input_scale=None if input_scale is None else input_scale.name,
        )
    _refuse_sibling(weight, siblings, "input_scale")
    scale.expect((-(-rows // BLOCK), -(-cols // BLOCK)), (*PLAIN_DTYPES, torch.float8_e8m0fnu))
    # Padded blocks hold zeros; a scale of 1 keeps them harmless for kernels that divide by it or take its logarithm.
    grid = Part(meta=scale, convert=lambda v: float_scales(v, scale), row_unit=BLOCK, col_unit=BLOCK, pad_value=1)
    return LinearLayout(format_name="fp8_block", shape=(rows, cols), parts=(data, grid))


def _fp4_layout(weight: TensorMeta, scale: TensorMeta, siblings: dict[str, TensorMeta]) -> LinearLayout:
    rows, cols = weight.shape[0], weight.shape[1] * 2
    group = NVFP4_GROUP if scale.dtype == torch.float8_e4m3fn else MXFP4_GROUP
    if cols % group:
        raise CheckpointError(f"{weight.where}: {cols} elements a row are no multiple of {group}, the scales' group")
    codes = Part(meta=weight, convert=_as_bytes, col_unit=2)
    if scale.dtype == torch.float8_e4m3fn:
        if "weight_scale_2" not in siblings:
            raise CheckpointError(f"{scale.where}: NVFP4 block scales without '{scale.name}_2'")
        scale.expect((rows, cols // group), (torch.float8_e4m3fn,))
        scalars = {suffix: siblings[suffix] for suffix in ("weight_scale_2", "input_scale") if suffix in siblings}
        for meta in scalars.values():
            _check_scalar(meta)
        return LinearLayout(
            format_name="nvfp4",
            shape=(rows, cols),
            parts=(codes, Part(meta=scale, convert=lambda v: e4m3_scales(v, scale), col_unit=group)),
            scale=scalars["weight_scale_2"].name,
            input_scale=scalars["input_scale"].name if "input_scale" in scalars else None,
        )
    _refuse_sibling(weight, siblings, "weight_scale_2")
    _refuse_sibling(weight, siblings, "input_scale")
    scale.expect((rows, cols // group), (torch.float8_e8m0fnu, torch.uint8, torch.float32))
    exponents = Part(meta=scale, convert=lambda v: e8m0_scales(v, scale), col_unit=group)
    return LinearLayout(format_name="mxfp4", shape=(rows, cols), parts=(codes, exponents))


def _matrix(meta: TensorMeta) -> tuple[int, int]:
    if len(meta.shape) != 2:
        raise CheckpointError(f"{meta.where}: expected a matrix [N, K], found shape {list(meta.shape)}")
    return meta.shape[0], meta.shape[1]


def _same(values: torch.Tensor) -> torch.Tensor:
    return values


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8)


def _check_scalar(meta: TensorMeta) -> None:
    if meta.shape not in ((), (1,)):
        raise CheckpointError(f"{meta.where}: expected one number, shape [] or [1], found {list(meta.shape)}")
    meta.expect(dtypes=(torch.float32, torch.bfloat16))


def _refuse_sibling(weight: TensorMeta, siblings: dict[str, TensorMeta], suffix: str) -> None:
    if suffix in siblings:
        raise CheckpointError(f"{siblings[suffix].where}: does not belong to the format of '{weight.name}'")
