"""Router GEMM and choice of experts in one kernel: softmax over the top-k (GPT-OSS), or sigmoid scores with a
correction bias, limited to the best groups (DeepSeek-V3).

Weights that bf16 holds exactly are multiplied as bf16 with fp32 sums, which gives the products of fp32 exactly.
Shape letters: T tokens, H hidden, E experts, G groups, K top-k, S parts of the hidden axis.
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe.config import RoutingConfig, RoutingMethod
from moe.kernels.arrivals import counters, is_last_to_arrive
from moe.kernels.compile_ahead import launch
from moe.kernels.pdl import pdl_options
from moe.kernels.replicas import place, table_arguments
from moe.replicas import NO_TABLES, ExpertTables
from moe.routing import StandardTopK

_FEW_BLOCK_T = 16
_MOST_FEW_TOKENS = 1024  # above, large blocks fill the GPU
_MAX_PARTS = 16
_FEWEST_EXPERTS, _MOST_EXPERTS = 16, 256  # `tl.dot` takes no fewer; more are too wide for one program
_PROGRAMS = 128  # enough that every processor reads a part of the weights
_LARGEST = tl.constexpr(3.4028234663852886e38)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Tokens of a program where there are many, and its steps along the hidden axis."""

    many_tokens: int
    block_h: int
    num_warps: int
    num_stages: int


# With up to so many tokens the last program has little to add up, so the hidden axis has more parts.
# The router of so few tokens does not start the next kernel early if it takes a softmax: on an H200, a layer of
# GPT-OSS-20B then takes 1.3 us less, and 9 less where tokens are counted. Programs of the first product that wait
# beside the router's few ones are spread unevenly over the processors, so the product takes longer. A layer of
# DeepSeek-V3, whose choice takes longer, gains 2 us by starting it early.
_VERY_FEW_TOKENS, _MAX_PARTS_OF_VERY_FEW = 4, 32
_TILE, _WIDE_TILE = _Tile(64, 64, 4, 3), _Tile(32, 32, 8, 4)
_MOST_OF_TILE = 128  # experts; more take registers and shared memory, and a wide tile


@triton.jit
def _round_to_bf16(x):
    """The nearest bf16 number as fp32, ties to even; not of NaN. In bits, since Triton's interpreter truncates."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _no_nan(x):
    """NaN as the lowest number, infinities as the largest ones."""
    return tl.where(x != x, -_LARGEST, tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST))  # noqa: PLR0124


@triton.jit
def _mask_groups(ranks_TE, E: tl.constexpr, G: tl.constexpr, KEPT: tl.constexpr, BLOCK_T: tl.constexpr):
    """-inf outside the KEPT groups with the largest sums of their two best ranks; ties to the lowest group."""
    ranks_TGM = tl.reshape(ranks_TE, (BLOCK_T, G, E // G))
    member = tl.arange(0, E // G)[None, None, :]
    best_TG = tl.max(ranks_TGM, 2)
    first_TG = tl.min(tl.where(ranks_TGM == best_TG[:, :, None], member, E), 2)
    others_TGM = tl.where(member == first_TG[:, :, None], float("-inf"), ranks_TGM)
    sums_TG = best_TG + tl.max(others_TGM, 2)
    group = tl.arange(0, G)[None, :]
    is_kept_TG = tl.zeros((BLOCK_T, G), tl.int32)
    for _ in range(KEPT):  # a sum may be -inf, so those that are left are told apart by the mask
        left_TG = tl.where(is_kept_TG > 0, float("-inf"), sums_TG)
        is_best_TG = (left_TG == tl.max(left_TG, 1)[:, None]) & (is_kept_TG == 0)
        chosen_T = tl.min(tl.where(is_best_TG, group, G), 1)
        is_kept_TG += (group == chosen_T[:, None]).to(tl.int32)
    return tl.reshape(tl.where(is_kept_TG[:, :, None] > 0, ranks_TGM, float("-inf")), (BLOCK_T, E))


@triton.jit
def _choose(
    logits_TE, bias_ptr, correction_ptr, ids_ptr, weights_ptr, counts_ptr, table_ptr, num_live,
    t, num_tokens, first_token, factor,
    E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, G: tl.constexpr, KEPT: tl.constexpr,
    BLOCK_T: tl.constexpr, IS_SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_CORRECTION: tl.constexpr, ROUND_TO_BF16: tl.constexpr,
    DROPS: tl.constexpr, COUNTS: tl.constexpr, HAS_LIVE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Write the ids of the K largest logits or corrected scores (ties to the lowest id), or their slots; their weights.

    ROUND_TO_BF16: the logits are rounded before. DROPS: padding gets -1 in place of ids. The last three constants are
    those of `replicas.place`.
    """
    e = tl.arange(0, E_PAD)
    k = tl.arange(0, K_PAD)
    if HAS_BIAS:
        logits_TE += tl.load(bias_ptr + e, mask=e < E, other=0.0)[None, :]
    if ROUND_TO_BF16:
        logits_TE = tl.where(logits_TE != logits_TE, logits_TE, _round_to_bf16(logits_TE))  # noqa: PLR0124
    values_TE = 1.0 / (1.0 + tl.exp(-logits_TE)) if IS_SIGMOID else _no_nan(logits_TE)
    ranks_TE = values_TE
    if HAS_CORRECTION:
        ranks_TE += tl.load(correction_ptr + e, mask=e < E, other=0.0)[None, :]
    ranks_TE = tl.where((e < E)[None, :], _no_nan(ranks_TE), float("-inf"))
    if G > 1:
        ranks_TE = _mask_groups(ranks_TE, E, G, KEPT, BLOCK_T)
    values_TK = tl.full((BLOCK_T, K_PAD), 0.0 if IS_SIGMOID else float("-inf"), tl.float32)
    ids_TK = tl.zeros((BLOCK_T, K_PAD), tl.int32)
    for choice in range(K):
        best_T = tl.max(ranks_TE, 1)
        id_T = tl.min(tl.where(ranks_TE == best_T[:, None], e[None, :], E_PAD), 1)
        is_id_TE = e[None, :] == id_T[:, None]
        if IS_SIGMOID:
            best_T = tl.sum(tl.where(is_id_TE, values_TE, 0.0), 1)
        values_TK = tl.where(k[None, :] == choice, best_T[:, None], values_TK)
        ids_TK = tl.where(k[None, :] == choice, id_T[:, None], ids_TK)
        ranks_TE = tl.where(is_id_TE, float("-inf"), ranks_TE)
    if IS_SIGMOID:
        weights_TK = values_TK
        if NORMALIZE:
            weights_TK = weights_TK / (tl.sum(weights_TK, 1)[:, None] + 1e-20)
    else:
        weights_TK = tl.exp(values_TK - tl.max(values_TK, 1)[:, None])
        weights_TK = weights_TK / tl.sum(weights_TK, 1)[:, None]
    out = t[:, None] * K + k[None, :]
    mask_TK = (t < num_tokens)[:, None] & (k < K)[None, :]
    if DROPS:
        ids_TK = tl.where((t + first_token < num_live)[:, None], ids_TK, -1)
    if COUNTS or PLACES:
        t_TK = t[:, None] + tl.zeros_like(ids_TK)
        ids_TK = place(
            ids_TK, t_TK, mask_TK, counts_ptr, table_ptr, num_live, first_token, E, COUNTS, HAS_LIVE, PLACES
        )  # fmt: skip
    tl.store(ids_ptr + out, ids_TK, mask=mask_TK)
    tl.store(weights_ptr + out, weights_TK * factor, mask=mask_TK)


@triton.jit(do_not_specialize=["num_tokens", "num_parts", "first_token"])
def _route(
    x_ptr, weight_ptr, bias_ptr, correction_ptr, parts_ptr, arrived_ptr, ids_ptr, weights_ptr,
    num_tokens, num_parts, first_token, x_stride, factor, counts_ptr, table_ptr, live_ptr,
    H: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    G: tl.constexpr, KEPT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, IS_SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CORRECTION: tl.constexpr, ROUND_TO_BF16: tl.constexpr,
    DROPS: tl.constexpr, COUNTS: tl.constexpr, HAS_LIVE: tl.constexpr, PLACES: tl.constexpr,
    MAX_PARTS: tl.constexpr, CHOSEN_T: tl.constexpr, STARTS_NEXT: tl.constexpr, USE_PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Logits of BLOCK_T tokens, then their experts. Grid: (blocks of T, S).

    If the hidden axis is split (MAX_PARTS > 1), program s sums the s-th share into parts [S, T, E], and the last one
    adds them up, in the order of s. It chooses for CHOSEN_T tokens, which is less than BLOCK_T if there are no more.
    STARTS_NEXT: the next kernel's programs may already wait while these ones run.
    """
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = tl.program_id(1)
    e = tl.arange(0, E_PAD)
    is_token_T = t < num_tokens
    if USE_PDL:
        gdc_wait()
        if STARTS_NEXT:
            gdc_launch_dependents()
    num_live = tl.load(live_ptr) if HAS_LIVE or DROPS else 0
    steps = tl.cdiv(tl.cdiv(H, BLOCK_H), num_parts)
    logits_TE = tl.zeros((BLOCK_T, E_PAD), tl.float32)
    for step in range(part * steps, part * steps + steps):
        h = step * BLOCK_H + tl.arange(0, BLOCK_H)
        x_TH = tl.load(
            x_ptr + t.to(tl.int64)[:, None] * x_stride + h[None, :],
            mask=is_token_T[:, None] & (h < H)[None, :], other=0.0,
        )  # fmt: skip
        w_HE = tl.load(weight_ptr + e[None, :] * H + h[:, None], mask=(e < E)[None, :] & (h < H)[:, None], other=0.0)
        if INTERPRET:  # the interpreter multiplies bf16 wrongly
            x_TH, w_HE = x_TH.to(tl.float32), w_HE.to(tl.float32)
        logits_TE = tl.dot(x_TH, w_HE, logits_TE, input_precision="ieee")
    if MAX_PARTS == 1:
        _choose(
            logits_TE, bias_ptr, correction_ptr, ids_ptr, weights_ptr, counts_ptr, table_ptr, num_live,
            t, num_tokens, first_token, factor,
            E, E_PAD, K, K_PAD, G, KEPT, BLOCK_T, IS_SIGMOID, NORMALIZE, HAS_BIAS, HAS_CORRECTION, ROUND_TO_BF16,
            DROPS, COUNTS, HAS_LIVE, PLACES,
        )  # fmt: skip
    else:
        part_stride = num_tokens.to(tl.int64) * E
        tl.store(
            parts_ptr + part * part_stride + t.to(tl.int64)[:, None] * E + e[None, :], logits_TE,
            mask=is_token_T[:, None] & (e < E)[None, :],
        )  # fmt: skip
        if is_last_to_arrive(arrived_ptr + tl.program_id(0), num_parts):
            chosen_t = tl.program_id(0) * BLOCK_T + tl.arange(0, CHOSEN_T)
            mask_TE = (chosen_t < num_tokens)[:, None] & (e < E)[None, :]
            part_ptrs = parts_ptr + chosen_t.to(tl.int64)[:, None] * E + e[None, :]
            total_TE = tl.zeros((CHOSEN_T, E_PAD), tl.float32)
            for other in tl.static_range(MAX_PARTS):
                total_TE += tl.load(
                    part_ptrs + other * part_stride, mask=mask_TE & (other < num_parts), other=0.0, cache_modifier=".cg"
                )
            _choose(
                total_TE, bias_ptr, correction_ptr, ids_ptr, weights_ptr, counts_ptr, table_ptr, num_live,
                chosen_t, num_tokens, first_token, factor,
                E, E_PAD, K, K_PAD, G, KEPT, CHOSEN_T, IS_SIGMOID, NORMALIZE, HAS_BIAS, HAS_CORRECTION, ROUND_TO_BF16,
                DROPS, COUNTS, HAS_LIVE, PLACES,
            )  # fmt: skip


def can_route(config: RoutingConfig) -> bool:
    """Whether `route` serves these rules."""
    num_experts, group_size = config.num_experts, config.num_experts // config.num_groups
    if num_experts > _MOST_EXPERTS:
        return False
    if config.method is RoutingMethod.SOFTMAX_AFTER_TOPK:
        return config.normalize
    if config.method is not RoutingMethod.SIGMOID_GROUPED:
        return False
    is_power_of_two = num_experts & (num_experts - 1) == 0 and group_size & (group_size - 1) == 0
    return config.num_groups == 1 or (is_power_of_two and num_experts >= _FEWEST_EXPERTS and group_size > 1)


def route(
    x_TH: torch.Tensor,
    weight_EH: torch.Tensor,
    bias_E: torch.Tensor | None,
    config: RoutingConfig,
    correction_bias_E: torch.Tensor | None = None,
    *,
    logits_dtype: torch.dtype = torch.float32,
    tables: ExpertTables = NO_TABLES,
    num_live: torch.Tensor | None = None,
    first_token: int = 0,
    drops_padding: bool = False,
) -> StandardTopK:
    """`moe.routing.route` of `x @ weight.T + bias` in `logits_dtype`, fp32 or bf16, for rules that `can_route` accepts.

    x and weight are bf16, their products are summed in fp32 whatever the dtype of the logits. Biases are fp32.
    `drops_padding`: also what `moe.routing.drop_padding` does, where there is `num_live`. The three arguments before it
    are those of `moe.replicas.count_and_place`, which the same kernel does.
    """
    num_tokens, hidden = x_TH.shape
    num_experts = config.num_experts
    ids_TK = torch.empty(num_tokens, config.top_k, dtype=torch.int32, device=x_TH.device)
    weights_TK = torch.empty(num_tokens, config.top_k, dtype=torch.float32, device=x_TH.device)
    if not num_tokens:
        return StandardTopK(weights_TK, ids_TK)
    tile = _TILE if num_experts <= _MOST_OF_TILE else _WIDE_TILE
    block_t = _FEW_BLOCK_T if num_tokens <= _MOST_FEW_TOKENS else tile.many_tokens
    num_blocks = triton.cdiv(num_tokens, block_t)
    chosen_t, max_parts = block_t, _MAX_PARTS
    if num_tokens <= _VERY_FEW_TOKENS:
        chosen_t, max_parts = _VERY_FEW_TOKENS, _MAX_PARTS_OF_VERY_FEW
    num_parts = max(1, min(max_parts, _PROGRAMS // num_blocks, triton.cdiv(hidden, tile.block_h)))
    is_split = num_parts > 1
    is_sigmoid = config.method is RoutingMethod.SIGMOID_GROUPED
    correction_bias_E = correction_bias_E if is_sigmoid else None  # softmax has none
    parts = torch.empty(num_parts if is_split else 0, num_tokens, num_experts, dtype=torch.float32, device=x_TH.device)
    launch(_route, (num_blocks, num_parts))(
        x_TH, weight_EH, weights_TK if bias_E is None else bias_E,
        weights_TK if correction_bias_E is None else correction_bias_E, parts, counters(x_TH.device, "router"),
        ids_TK, weights_TK, num_tokens, num_parts, first_token, x_TH.stride(0), config.routed_scaling_factor,
        H=hidden, E=num_experts, E_PAD=max(_FEWEST_EXPERTS, triton.next_power_of_2(num_experts)), K=config.top_k,
        K_PAD=triton.next_power_of_2(config.top_k), G=config.num_groups if is_sigmoid else 1,
        KEPT=config.num_kept_groups, BLOCK_T=block_t, BLOCK_H=tile.block_h, IS_SIGMOID=is_sigmoid,
        NORMALIZE=config.normalize, HAS_BIAS=bias_E is not None, HAS_CORRECTION=correction_bias_E is not None,
        ROUND_TO_BF16=logits_dtype is torch.bfloat16, DROPS=drops_padding and num_live is not None,
        MAX_PARTS=max_parts if is_split else 1, CHOSEN_T=chosen_t,
        STARTS_NEXT=is_sigmoid or num_tokens > _VERY_FEW_TOKENS,
        INTERPRET=bool(triton.knobs.runtime.interpret), num_warps=tile.num_warps, num_stages=tile.num_stages,
        **pdl_options(x_TH.device), **table_arguments(tables, num_live, ids_TK),
    )  # fmt: skip
    return StandardTopK(weights_TK, ids_TK)
