"""DeepSeek-style experts, where every expert has its own gate, up and down layers, in any of the five formats.

Bytes go straight from the mapped file into one buffer per part of the weight, so a layer exists once in memory.
Letters: E experts, H hidden, I intermediate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loaders.errors import CheckpointError
from loaders.quant import COLUMNS, ROWS, LinearLayout, Part, build_weight, inspect_linear
from loaders.scales import read_scalar
from loaders.source import TensorSource, dtype_name
from moe.formats import FORMATS, ExpertWeights, Weight
from moe.geometry import Cut, ExpertShape, RankPlace

_ALONE = RankPlace()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """What a checkpoint calls the three layers of an expert, between the expert's number and `.weight`."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


_NAMES = ExpertNames()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Expert:
    gate: LinearLayout
    up: LinearLayout
    down: LinearLayout


def read_split_experts(
    source: TensorSource,
    prefix: str,
    shape: ExpertShape,
    place: RankPlace = _ALONE,
    names: ExpertNames = _NAMES,
    *,
    held: Sequence[int] | None = None,
) -> ExpertWeights:
    """Experts `prefix.0` to `prefix.<num_experts - 1>`. `held`: those of this rank in the order of its slots; None for
    its part of all.

    The headers of all experts are checked on every rank; other ranks' tensors count as used and are not read, but for
    the scalar scales, which must not depend on the rank. Scales of gate and up that differ anywhere in the layer are
    kept per half, [E, 2]. A missing `input_scale` becomes the layer's largest. The intermediate size of the result is
    padded to whole scale blocks (fp8_block: 128), with zeros.

    Raises:
        CheckpointError: a tensor is missing, half a scale set, wrong shape or dtype, an invalid scale, or
            formats that differ between experts.
        MoeConfigError: (of moe) the experts cannot be shared among the ranks.
    """
    local = place.expert_range(shape.num_experts) if held is None else held
    up_shape, down_shape = (shape.intermediate_size, shape.hidden_size), (shape.hidden_size, shape.intermediate_size)
    experts = [
        _Expert(
            gate=_inspect(source, f"{prefix}.{e}.{names.gate}", up_shape),
            up=_inspect(source, f"{prefix}.{e}.{names.up}", up_shape),
            down=_inspect(source, f"{prefix}.{e}.{names.down}", down_shape),
        )
        for e in range(shape.num_experts)
    ]
    _check_uniform(experts)
    cut = place.cut(shape.intermediate_size, FORMATS[experts[0].gate.format_name].col_block)
    w13, input_max13 = _read_weight(source, [(x.gate, x.up) for x in experts], local, ROWS, cut)
    w2, input_max2 = _read_weight(source, [(x.down,) for x in experts], local, COLUMNS, cut)
    for expert in experts:
        for layout in (expert.gate, expert.up, expert.down):
            source.mark_used(part.meta.name for part in layout.parts)
    scales = None if input_max13 is None or input_max2 is None else (input_max13, input_max2)
    return ExpertWeights(w13=w13, w2=w2, layer_input_scales=scales)


def _inspect(source: TensorSource, prefix: str, shape: tuple[int, int]) -> LinearLayout:
    layout = inspect_linear(source, prefix)
    if layout.shape != shape:
        raise CheckpointError(
            f"{layout.weight.where}: expected {list(shape)} elements by the config, found {list(layout.shape)}"
        )
    return layout


def _check_uniform(experts: list[_Expert]) -> None:
    first = experts[0].gate
    for expert in experts:
        for layout in (expert.gate, expert.up, expert.down):
            found = (layout.format_name, layout.weight.dtype)
            if found != (first.format_name, first.weight.dtype):
                raise CheckpointError(
                    f"{layout.weight.where}: {found[0]} ({dtype_name(found[1])}), but '{first.weight.name}' of the "
                    f"same layer is {first.format_name} ({dtype_name(first.weight.dtype)}); one format is expected"
                )


def _read_weight(
    source: TensorSource, layers: list[tuple[LinearLayout, ...]], local: Sequence[int], axis: int, cut: Cut
) -> tuple[Weight, float | None]:
    """Stack (gate, up) of all local experts along the rows, or (down,) alone; `axis` is the one that is cut.

    With it goes the largest input scale of the whole layer, other ranks' experts included.
    """
    mine = [layers[e] for e in local]
    parts = [
        _stage(source, [tuple(layout.parts[i] for layout in halves) for halves in mine], axis, cut)
        for i in range(len(mine[0][0].parts))
    ]
    scale = _scalars(source, [[layout.scale for layout in halves] for halves in layers])
    input_scale = _scalars(source, [[layout.input_scale for layout in halves] for halves in layers])
    keep = list(local)
    weight = build_weight(
        layers[0][0].format_name,
        parts,
        None if scale is None else scale[keep],
        None if input_scale is None else input_scale[keep],
    )
    return weight, None if input_scale is None else float(input_scale.amax())


def _stage(source: TensorSource, experts: list[tuple[Part, ...]], axis: int, cut: Cut) -> torch.Tensor:
    """One part of all experts' weights in one buffer [E, halves * rows, cols], cut along `axis` and padded there."""
    sample = experts[0][0]
    unit = sample.row_unit if axis == ROWS else sample.col_unit
    length, padded = -(-cut.length // unit), cut.padded // unit
    span = range(cut.start, cut.start + cut.length)
    buffer: torch.Tensor | None = None
    for e, halves in enumerate(experts):
        for h, part in enumerate(halves):
            piece = part.view(source, axis, span)
            if buffer is None:
                shape = [len(experts), len(halves), *piece.shape]
                shape[axis] = padded
                buffer = piece.new_full(shape, part.pad_value) if padded > length else piece.new_empty(shape)
            buffer[e, h].narrow(axis, 0, length).copy_(piece)
    if buffer is None:
        raise CheckpointError(f"{source.origin}: a layer needs at least one expert")
    return buffer.flatten(1, 2)


def _scalars(source: TensorSource, names: list[list[str | None]]) -> torch.Tensor | None:
    """Per-tensor scales of all experts: [E], or [E, 2] where gate and up differ; None if no expert has one.

    Missing entries become the largest of the others: calibration never reached those experts.
    """
    found = [[None if name is None else read_scalar(source, name) for name in halves] for halves in names]
    present = [value for halves in found for value in halves if value is not None]
    if not present:
        return None
    largest = torch.stack(present).amax()
    values = torch.stack([torch.stack([largest if v is None else v for v in halves]) for halves in found])
    return values[:, 0].contiguous() if bool((values == values[:, :1]).all()) else values
