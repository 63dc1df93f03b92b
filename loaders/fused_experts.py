"""GPT-OSS experts, where one tensor holds all experts of a layer: published MXFP4, and the bf16 re-upload.

Letters: E experts, H hidden, I intermediate, G = K/32 groups of 32 elements (16 bytes of codes).

    published      gate_up_proj_blocks [E,2I,G,16], _scales [E,2I,G]: rows 2i = gate_i, 2i+1 = up_i
                   down_proj_blocks    [E,H,G,16],  _scales [E,H,G]
    bf16 upload    gate_up_proj [E,H,2I]: transposed, columns interleaved;  down_proj [E,I,H]: transposed
    both           gate_up_proj_bias [E,2I] interleaved, down_proj_bias [E,H]
"""

from collections.abc import Sequence

import torch

from loaders.errors import CheckpointError
from loaders.finite import finite_values
from loaders.quant import PLAIN_DTYPES
from loaders.scales import e8m0_scales
from loaders.source import TensorSource
from moe.formats import Bf16Weight, ExpertWeights, Mxfp4Weight, Weight
from moe.formats.mxfp4 import GROUP
from moe.geometry import Cut, ExpertShape, RankPlace

_BYTE_SCALES = (torch.uint8, torch.float8_e8m0fnu)
_ALONE = RankPlace()


def read_gpt_oss_experts(
    source: TensorSource, prefix: str, shape: ExpertShape, place: RankPlace = _ALONE, held: Sequence[int] | None = None
) -> ExpertWeights:
    """Experts under `prefix` (such as "model.layers.0.mlp.experts"), biases included. `held`: their numbers in the
    order of the rank's slots; None for its part of all.

    With tensor parallelism the result has the padded intermediate size of the rank, and b2 whole on every rank: whoever
    sums the ranks must count it once.

    Raises:
        CheckpointError: a tensor is missing, half a scale set, or has the wrong shape or dtype, or a bias that is
            not finite; names file and tensor.
        MoeConfigError: (of moe) the experts cannot be shared among the ranks.
    """
    experts = place.expert_range(shape.num_experts) if held is None else held
    w13: Weight
    w2: Weight
    if _is_published(source, prefix):
        cut = place.cut(shape.intermediate_size, Mxfp4Weight.col_block)
        w13, w2 = _read_published(source, prefix, shape, experts, cut)
    else:
        cut = place.cut(shape.intermediate_size, Bf16Weight.col_block)
        w13, w2 = _read_transposed(source, prefix, shape, experts, cut)
    b13_name, b2_name = f"{prefix}.gate_up_proj_bias", f"{prefix}.down_proj_bias"
    source.expect(b13_name, shape=(shape.num_experts, 2 * shape.intermediate_size), dtypes=PLAIN_DTYPES)
    source.expect(b2_name, shape=(shape.num_experts, shape.hidden_size), dtypes=PLAIN_DTYPES)
    b13, b2 = _separate(_local(source, b13_name, experts), cut), _local(source, b2_name, experts).clone()
    for name, bias in ((b13_name, b13), (b2_name, b2)):
        finite_values(bias, source.meta(name))
    return ExpertWeights(w13=w13, w2=w2, b13=b13, b2=b2)


def _is_published(source: TensorSource, prefix: str) -> bool:
    """True for blocks and scales, False for dense tensors; a mixture is an error."""
    dense = [name for p in ("gate_up_proj", "down_proj") if (name := f"{prefix}.{p}") in source]
    for projection in ("gate_up_proj", "down_proj"):
        blocks, scales = f"{prefix}.{projection}_blocks", f"{prefix}.{projection}_scales"
        if scales in source and blocks not in source:
            raise CheckpointError(f"{source.meta(scales).where}: a scale without its weight '{blocks}'")
        if blocks in source and scales not in source:
            raise CheckpointError(f"{source.meta(blocks).where}: MXFP4 blocks without their scale '{scales}'")
        if blocks in source and dense:
            raise CheckpointError(f"{source.meta(blocks).where}: stands beside the dense '{dense[0]}'; one is expected")
    return not dense


def _read_published(
    source: TensorSource, prefix: str, shape: ExpertShape, experts: Sequence[int], cut: Cut
) -> tuple[Mxfp4Weight, Mxfp4Weight]:
    num_experts, hidden, inter = shape.num_experts, shape.hidden_size, shape.intermediate_size
    for size, name in ((hidden, "hidden_size"), (inter, "intermediate_size")):
        if size % GROUP:
            raise CheckpointError(f"{source.origin}: {name} is {size}: MXFP4 needs a multiple of {GROUP}")
    gate_up, down = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
    gate_up_shape, down_shape = (num_experts, 2 * inter, hidden // GROUP), (num_experts, hidden, inter // GROUP)
    for name, groups in ((gate_up, gate_up_shape), (down, down_shape)):
        source.expect(f"{name}_blocks", shape=(*groups, GROUP // 2), dtypes=(torch.uint8,))
        source.expect(f"{name}_scales", shape=groups, dtypes=_BYTE_SCALES)
    w13 = [_separate(_local(source, f"{gate_up}_{kind}", experts), cut) for kind in ("blocks", "scales")]
    w2 = [_cut_groups(_local(source, f"{down}_{kind}", experts), cut) for kind in ("blocks", "scales")]
    for name, scales in ((gate_up, w13[1]), (down, w2[1])):
        e8m0_scales(scales, source.meta(f"{name}_scales"))
    return Mxfp4Weight(w13[0].flatten(-2), w13[1]), Mxfp4Weight(w2[0].flatten(-2), w2[1])


def _read_transposed(
    source: TensorSource, prefix: str, shape: ExpertShape, experts: Sequence[int], cut: Cut
) -> tuple[Bf16Weight, Bf16Weight]:
    num_experts, hidden, inter = shape.num_experts, shape.hidden_size, shape.intermediate_size
    gate_up, down = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
    source.expect(gate_up, shape=(num_experts, hidden, 2 * inter), dtypes=PLAIN_DTYPES)
    source.expect(down, shape=(num_experts, inter, hidden), dtypes=PLAIN_DTYPES)
    w13_E2IH = _separate(_local(source, gate_up, experts).transpose(1, 2), cut)
    down_EIH = _local(source, down, experts)
    w2_EHI = down_EIH.new_zeros((len(experts), hidden, cut.padded))
    w2_EHI[:, :, : cut.length] = down_EIH.narrow(1, cut.start, cut.length).transpose(1, 2)
    return Bf16Weight(w13_E2IH), Bf16Weight(w2_EHI)


def _local(source: TensorSource, name: str, experts: Sequence[int]) -> torch.Tensor:
    """This rank's experts, still mapped from the file if they are neighbours there; e8m0 as bytes."""
    view = source.view(name)
    if view.dtype == torch.float8_e8m0fnu:
        view = view.view(torch.uint8)
    first = experts[0]
    if list(experts) == list(range(first, first + len(experts))):
        return view.narrow(0, first, len(experts))
    return view.index_select(0, torch.tensor(experts))


def _separate(interleaved: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Rows g0 u0 g1 u1 ... of axis 1 ([E, 2I, ...]) to [gate; up], cut and each half padded: [E, 2 * padded, ...]."""
    num_experts, _, *rest = interleaved.shape
    halves = interleaved.new_zeros((num_experts, 2, cut.padded, *rest))
    pairs = interleaved.unflatten(1, (-1, 2)).narrow(1, cut.start, cut.length)
    halves[:, :, : cut.length] = pairs.transpose(1, 2)
    return halves.flatten(1, 2)


def _cut_groups(down: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Groups of 32 along axis 2 ([E, H, G, ...]), cut and padded; codes and scale bytes of the padding are 0."""
    num_experts, hidden, _, *rest = down.shape
    out = down.new_zeros((num_experts, hidden, cut.padded // GROUP, *rest))
    length = cut.length // GROUP
    out[:, :, :length] = down.narrow(2, cut.start // GROUP, length)
    return out
