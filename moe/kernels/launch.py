"""Launches one layer's kernels by a plan. Needs Triton; makes no choices and never waits for the device.

Shape letters: T tokens, K top-k, S slots (T*K), E local experts, H hidden, I intermediate.
"""

import functools
from dataclasses import dataclass, replace

import torch
import triton

from moe.config import Activation
from moe.device import arch_of
from moe.kernels.arrivals import MAX_COUNTERS, parts_at_once
from moe.kernels.compile_ahead import launch
from moe.kernels.gemm import direct_gemm, grouped_gemm
from moe.kernels.group import group_slots, unpermute_sum
from moe.kernels.layout import STEP, WORDS, PackedMatrix
from moe.kernels.plan import Plan
from moe.kernels.products import BF16, FP8_BLOCK, FP8_BOTH, MXFP4, NVFP4
from moe.kernels.quantize import quantize_rows

_FORMATS = {"bf16": BF16.value, "fp8_block": FP8_BLOCK.value, "mxfp4": MXFP4.value, "nvfp4": NVFP4.value}
# For few tokens, blocks of 512 columns are faster, unless there are many of them: on an H200, an NVFP4 layer of 7,168
# columns took 88 us with 14 such blocks and 78 with 7 of 1,024.
_SUM_COLUMNS, _SUM_COLUMNS_OF_FEW = 1024, 512
_FEW_TOKENS, _FEW_BLOCKS = 16, 8
_QUANTIZE_ROWS = 32
_INT32_MAX = 2**31 - 1
_FEWEST_SLOTS = 64
_WARPS_OF_GROUP = 4  # that a product of Hopper's takes


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The constants of one layer. Experts first_expert .. first_expert + E - 1 are local.

    `arrived`: `counters` of the device, for tiles that several programs compute. Layers that run one after another
    share them.
    """

    w13: PackedMatrix
    w2: PackedMatrix
    first_expert: int
    num_experts: int
    top_k: int
    activation: Activation
    adds_bias_2: bool
    arrived: torch.Tensor

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.w13.num_cols

    @property
    def intermediate_size(self) -> int:
        """I on this rank."""
        return self.w2.num_cols


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Slots sorted by expert, and the tiles that they are cut into."""

    slots_S: torch.Tensor
    entries: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Split:
    """Programs of a direct tile along its reduction axis; and of the first matrix, where there are several, their sums.

    `at_once` of the sums are loaded at a time.
    """

    split_k: int
    sums: torch.Tensor | None = None
    arrived: torch.Tensor | None = None
    at_once: int = 1


def run_layer(
    x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, layer: Layer, plan: Plan, out_TH: torch.Tensor,
    *, max_rows: int | None = None,
) -> None:  # fmt: skip
    """Write the weighted sum over each token's local experts; ids are global, and ids of no local expert are skipped.

    bf16 x [T, H], int32 ids, fp32 weights, all contiguous; T > 0; no token has an expert twice. A direct plan takes at
    most MAX_DIRECT_SLOTS slots. Rows of x may be further apart than H.

    `max_rows`: for top-k 1 and a grouped plan, at most so many tokens have a local expert, and the others' rows of
    `out` may hold anything. Then the second GEMM writes `out` itself, whose rows may be further apart than H, too.
    """
    num_tokens = x_TH.shape[0]
    num_slots = num_tokens * layer.top_k
    num_steps = layer.w2.data.shape[1]
    if plan.split_k > num_steps:  # no part may be empty
        plan = replace(plan, split_k=num_steps)
    most_slots = num_slots if max_rows is None else min(num_slots, max_rows)
    tiles = None if plan.is_direct else _group(ids_TK, num_slots, most_slots, layer, plan)
    h_SI = x_TH.new_empty((num_slots, layer.intermediate_size))
    _gemm(x_TH, ids_TK, weights_TK, layer, plan, tiles, h_SI, is_first=True)
    if max_rows is not None:
        _gemm(h_SI, ids_TK, weights_TK, layer, plan, tiles, out_TH, is_first=False)
        return
    part_dtype = torch.float32 if plan.is_direct else torch.bfloat16  # few rows cost nothing; many are worth halving
    parts = torch.empty((num_slots, plan.split_k, layer.hidden_size), dtype=part_dtype, device=x_TH.device)
    _gemm(h_SI, ids_TK, weights_TK, layer, plan, tiles, parts, is_first=False)
    is_narrow = num_tokens <= _FEW_TOKENS and layer.hidden_size <= _FEW_BLOCKS * _SUM_COLUMNS_OF_FEW
    most_columns = _SUM_COLUMNS_OF_FEW if is_narrow else _SUM_COLUMNS
    block_h = min(most_columns, triton.next_power_of_2(layer.hidden_size))
    launch(unpermute_sum, (num_tokens, triton.cdiv(layer.hidden_size, block_h)))(
        parts, ids_TK, out_TH, layer.first_expert, layer.num_experts, layer.hidden_size,
        TOPK=layer.top_k, SPLIT_K=plan.split_k, BLOCK_H=block_h, USE_PDL=plan.pdl,
        num_warps=4, **_options(plan),
    )  # fmt: skip


def max_tiles(num_slots: int, num_experts: int, block_m: int) -> int:
    """Tiles that suffice for any routing of `num_slots` slots."""
    return min(num_slots, num_experts + num_slots // block_m)


def _group(ids_TK: torch.Tensor, num_slots: int, most_slots: int, layer: Layer, plan: Plan) -> _Tiles:
    """`most_slots`: those of local experts, at most."""
    num_tiles = max_tiles(most_slots, layer.num_experts, plan.block_m)
    slots_S = ids_TK.new_empty(num_slots)
    tiles = ids_TK.new_empty((num_tiles, 3))
    chunk = min(4096, max(512, triton.next_power_of_2(num_slots)))
    launch(group_slots, (layer.num_experts,))(
        ids_TK, slots_S, tiles, num_slots, num_tiles, layer.first_expert, layer.num_experts,
        BLOCK_M=plan.block_m, EXPERTS_PAD=triton.next_power_of_2(layer.num_experts + 1), CHUNK=chunk,
        USE_PDL=plan.pdl, num_warps=4 if chunk <= 512 else 8, **_options(plan),
    )  # fmt: skip
    return _Tiles(slots_S, tiles)


def _gemm(
    x: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, layer: Layer, plan: Plan, tiles: _Tiles | None,
    out: torch.Tensor, *, is_first: bool,
) -> None:  # fmt: skip
    matrix = layer.w13 if is_first else layer.w2
    block_n = plan.block_n_1 if is_first else plan.block_n_2
    num_warps = plan.num_warps_1 if is_first else plan.num_warps_2
    num_steps, num_blocks, words = matrix.data.shape[1], matrix.data.shape[2], WORDS[matrix.format_name]
    num_n = triton.cdiv(num_blocks * 64, block_n)
    scales = matrix.scales
    if scales is None:  # FP4 has its scales among the data, four bytes in one number; bf16 has none
        scales = matrix.data if matrix.format_name == "bf16" else matrix.data.view(torch.int32)
    activation, step = layer.activation, STEP[matrix.format_name]
    has_bias = matrix.bias is not None and (is_first or layer.adds_bias_2)
    interpret = bool(triton.knobs.runtime.interpret)
    format_code, num_cols, data = _FORMATS[matrix.format_name], matrix.num_cols, matrix.data
    x_scale, xs_stride = matrix.post, 0
    if plan.fp8_activations:
        x, x_scale = _quantize(x, ids_TK, matrix, plan, by_slot=not is_first)
        format_code, num_cols, data, words = FP8_BOTH.value, num_steps * step, data.view(torch.float8_e4m3fn), 2 * words
        xs_stride = x.shape[0]
    matrices = (
        x, x_scale, data, scales, data if matrix.tail is None else matrix.tail, matrix.post,
        matrix.bias if has_bias else matrix.post, out,
    )  # fmt: skip
    sizes = (
        x.stride(0), xs_stride, num_cols, out.shape[-1], out.stride(-2), num_blocks, num_steps,
        activation.alpha, activation.beta, 0.0 if activation.limit is None else activation.limit,
    )  # fmt: skip
    settings = {
        "FORMAT": format_code, "IS_FIRST": is_first, "TOPK": layer.top_k, "BLOCK_M": plan.block_m,
        "BLOCK_N": block_n, "STEP_K": step, "WORDS": words,
        "NUM_STAGES": plan.num_stages_1 if is_first else plan.num_stages_2, "HAS_BIAS": has_bias,
        "HAS_LIMIT": activation.limit is not None, "SHORT_K": num_cols < step,
        "HAS_TAIL": matrix.tail is not None,
        "IS_PITCHED": out.stride(-2) != out.shape[-1],
        "WIDE": max(tensor.shape[0] * tensor.stride(0) for tensor in (x, out)) > _INT32_MAX,
        "USE_ASM": not interpret, "USE_WGMMA": num_warps >= _WARPS_OF_GROUP and _is_hopper(x.device),
        "USE_PDL": plan.pdl, "INTERPRET": interpret, "num_warps": num_warps,
    }  # fmt: skip
    settings |= _options(plan)
    if tiles is None:
        num_tokens = ids_TK.shape[0]
        candidates = layer.num_experts if plan.by_expert else ids_TK.numel()
        most_tiles = triton.cdiv(num_tokens, plan.block_m)  # of an expert: it may be a choice of every token
        split = _first_split(layer, plan, ids_TK, num_n * candidates * most_tiles) if is_first else _Split(plan.split_k)
        launch(direct_gemm, (num_n, candidates, split.split_k * most_tiles))(
            *matrices, ids_TK, weights_TK, split.sums, split.arrived, num_tokens, layer.first_expert,
            layer.num_experts, *sizes,
            BY_EXPERT=plan.by_expert, SPLIT_K=split.split_k, AT_ONCE=split.at_once,
            CHOICES_PAD=triton.next_power_of_2(layer.top_k),
            SLOTS_PAD=0 if num_tokens <= plan.block_m else _slots_pad(ids_TK.numel()), **settings,
        )  # fmt: skip
    else:
        num_tiles = tiles.entries.shape[0]
        launch(grouped_gemm, (num_n * num_tiles,))(
            *matrices, tiles.slots_S, tiles.entries, weights_TK, num_tiles, plan.tile_group, *sizes,
            NUM_HEIGHTS=plan.num_tile_heights, **settings,
        )  # fmt: skip


def _first_split(layer: Layer, plan: Plan, ids_TK: torch.Tensor, num_tiles: int) -> _Split:
    """Parts of the first matrix's reduction axis: none of them may be empty, and each of the tiles needs a counter.

    More tiles than counters stay whole: they are many times what fills a GPU, so parts could only slow them down. A
    plan cannot refuse them, since it does not know the sizes of the layer.
    """
    num_steps, num_blocks = layer.w13.data.shape[1:3]
    split_k = 1 if num_tiles > MAX_COUNTERS else min(plan.split_k_1, num_steps)
    if split_k == 1:
        return _Split(1)
    sums = torch.empty((ids_TK.numel(), split_k, num_blocks * 64), dtype=torch.float32, device=ids_TK.device)
    at_once = parts_at_once(split_k - 1, plan.block_n_1 * plan.block_m, plan.num_warps_1)
    return _Split(split_k, sums, layer.arrived, at_once)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return arch_of(device) == "sm90"


def _slots_pad(num_slots: int) -> int:
    """SLOTS_PAD, which is compiled in: few sizes mean few compilations while serving."""
    return max(_FEWEST_SLOTS, triton.next_power_of_2(num_slots))


def _quantize(
    x: torch.Tensor, ids_TK: torch.Tensor, matrix: PackedMatrix, plan: Plan, *, by_slot: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 bytes [R, S * step] and fp32 scales [S, R] of the rows of x."""
    num_rows, num_steps, step = x.shape[0], matrix.data.shape[1], STEP[matrix.format_name]
    codes = torch.empty((num_rows, num_steps * step), dtype=torch.uint8, device=x.device)
    scales = torch.empty((num_steps, num_rows), dtype=torch.float32, device=x.device)
    interpret = bool(triton.knobs.runtime.interpret)
    launch(quantize_rows, (triton.cdiv(num_rows, _QUANTIZE_ROWS), num_steps))(
        x, ids_TK, codes, scales, num_rows, x.stride(0), matrix.num_cols, num_steps,
        BY_SLOT=by_slot, STEP_K=step, BLOCK_R=_QUANTIZE_ROWS, SHORT_K=matrix.num_cols < step,
        USE_CAST=not interpret, USE_PDL=plan.pdl, num_warps=4, **_options(plan),
    )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scales


def _options(plan: Plan) -> dict[str, bool]:
    """Compiler and launch options. Every kernel waits for the one before it before it reads what that one may write."""
    return {"enable_fp_fusion": True} | ({"launch_pdl": True} if plan.pdl else {})
