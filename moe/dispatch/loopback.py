"""Loopbacks: every transport's layout on one rank, without the library and other ranks. For self-check and tuning.

A loopback hands the experts what the transport would have left on this rank, including garbage, and adds their results
as the transport would. Experts of other ranks add zeros. Nothing leaves the rank.
Shape letters: T tokens, K top-k, R received rows, E local experts, M rows per expert, G groups of columns, H hidden.
"""

import torch

from moe.config import DispatchDtype, DispatchFormat, MoeRunnerConfig
from moe.dispatch.base import AnyExchange, ids_and_weights, pad_columns, without_minus_one
from moe.dispatch.deepep_settings import EpShape, expected_rows, ll_hidden_size
from moe.formats.nvfp4 import quantize_groups
from moe.formats.token_groups import pack_ue8m0, quantize_token_groups
from moe.layouts.rows import mma_view, round_up, swizzle_128x4
from moe.routing import StandardTopK, TopKOutput
from moe.topology import Topology
from moe.types import (
    DeepepLlDispatchOutput,
    DeepepNormalDispatchOutput,
    FlashinferCombineInput,
    FlashinferDispatchOutput,
    MoriDispatchOutput,
    RowsCombineInput,
    StandardCombineInput,
    StandardDispatchOutput,
)

LL_ROWS = 128  # rows per expert in low latency are a multiple of this, the strictest requirement of any kernel
SPARE_ROWS = 8  # unused rows at the end of receive buffers


def make_loopback(
    dispatch_format: DispatchFormat,
    config: MoeRunnerConfig,
    topology: Topology,
    *,
    expert_alignment: int = 1,
    input_scale: float | None = None,
) -> AnyExchange:
    """The loopback of one dispatch format, sending `topology.dispatch_dtype`.

    `expert_alignment`: see `DeepepDispatcher`. `input_scale`: the layer's static input scale, for an NVFP4 dispatch.
    """
    encoder = _Encoder(topology.dispatch_dtype, input_scale)
    if dispatch_format is DispatchFormat.STANDARD:
        return _Standard()
    if dispatch_format is DispatchFormat.DEEPEP_NORMAL:
        return _DeepepNormal(config, topology, encoder, expert_alignment)
    if dispatch_format is DispatchFormat.DEEPEP_LL:
        return _DeepepLl(config, topology, encoder)
    if dispatch_format is DispatchFormat.FLASHINFER:
        return _Flashinfer(config, topology, encoder)
    return _Mori(config, topology, encoder, dispatch_format)


class _Encoder:
    """Quantizes tokens to the dispatch dtype."""

    def __init__(self, dispatch_dtype: DispatchDtype, input_scale: float | None) -> None:
        self.dispatch_dtype = dispatch_dtype
        self._input_scale = input_scale

    def encode(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(data [T, H] or packed [T, H/2], scales [T, G] or None); power-of-two scales are not packed yet."""
        if self.dispatch_dtype is DispatchDtype.BF16:
            return x_TH, None
        if self.dispatch_dtype is DispatchDtype.NVFP4:
            return quantize_groups(x_TH.float(), torch.tensor(self._input_scale, device=x_TH.device))
        return quantize_token_groups(x_TH, ue8m0=self.dispatch_dtype is DispatchDtype.FP8_UE8M0)


class _Standard:
    def dispatch(self, hidden_states_TH: torch.Tensor, topk_output: TopKOutput) -> StandardDispatchOutput:
        return StandardDispatchOutput(hidden_states_TH, topk_output)

    def combine(self, result: StandardCombineInput) -> torch.Tensor:
        return result.hidden_states


class _Rows:
    """Base of the loopbacks that send rows: selects the received tokens and returns their results."""

    def __init__(self, config: MoeRunnerConfig, topology: Topology, encoder: _Encoder) -> None:
        self._config, self._topology, self._encoder = config, topology, encoder
        self._own = topology.expert_range(config.num_experts)
        self._num_tokens = 0
        self._tokens_R = torch.empty(0, dtype=torch.int64)

    def _receive(self, ids_TK: torch.Tensor) -> torch.Tensor:
        """bool [T, K]: True for slots of this rank's experts. Remembers which tokens have one."""
        is_own_TK = (ids_TK >= self._own.start) & (ids_TK < self._own.stop)
        self._num_tokens = ids_TK.shape[0]
        self._tokens_R = is_own_TK.any(1).nonzero()[:, 0]
        return is_own_TK

    def _return(self, rows_RH: torch.Tensor) -> torch.Tensor:
        out_TH = rows_RH.new_zeros((self._num_tokens, rows_RH.shape[1]))
        out_TH[self._tokens_R] = rows_RH
        return out_TH


class _DeepepNormal(_Rows):
    """Rows of received tokens with local ids."""

    def __init__(self, config: MoeRunnerConfig, topology: Topology, encoder: _Encoder, expert_alignment: int) -> None:
        super().__init__(config, topology, encoder)
        self._alignment = expert_alignment

    def dispatch(self, hidden_states_TH: torch.Tensor, topk_output: TopKOutput) -> DeepepNormalDispatchOutput:
        ids_TK, weights_TK = ids_and_weights(topk_output, torch.int64)
        is_own_TK = self._receive(ids_TK)
        rows = self._tokens_R
        local_RK = torch.where(is_own_TK, ids_TK - self._own.start, -1)[rows]
        counts = torch.bincount(local_RK[local_RK >= 0], minlength=len(self._own)).tolist()
        x_RH, scale_RG = self._encoder.encode(hidden_states_TH[rows])
        num_rows = [round_up(count, self._alignment) for count in counts]
        return DeepepNormalDispatchOutput(x_RH, scale_RG, local_RK, weights_TK[rows], num_rows)

    def combine(self, result: RowsCombineInput) -> torch.Tensor:
        return self._return(result.hidden_states)


class _DeepepLl(_Rows):
    """Rows per expert. Rows past the counts are NaN, and columns may be a view of a wider buffer."""

    def dispatch(self, hidden_states_TH: torch.Tensor, topk_output: TopKOutput) -> DeepepLlDispatchOutput:
        ids_TK, weights_TK = ids_and_weights(topk_output, torch.int64)
        token_S, slot_S = self._receive(ids_TK).nonzero(as_tuple=True)
        expert_S, order = (ids_TK[token_S, slot_S] - self._own.start).sort(stable=True)
        token_S, slot_S = token_S[order], slot_S[order]
        counts_E = torch.bincount(expert_S, minlength=len(self._own))
        row_S = torch.arange(len(expert_S), device=expert_S.device) - (counts_E.cumsum(0) - counts_E)[expert_S]
        self._slots = (token_S, expert_S, row_S, weights_TK[token_S, slot_S])
        num_rows = round_up(max(1, int(counts_E.max())), LL_ROWS)
        x, scale = self._spread(hidden_states_TH[token_S], expert_S, row_S, num_rows)
        shape = EpShape.of(self._config)
        expected = expected_rows(-(-self._num_tokens // shape.ep_size), shape)
        return DeepepLlDispatchOutput(x, scale, ids_TK, weights_TK, counts_E.to(torch.int32), expected)

    def _spread(
        self, x_SH: torch.Tensor, expert_S: torch.Tensor, row_S: torch.Tensor, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scatter the sent rows into [E, M, ...], in the layout of the dispatch dtype."""
        codes, scale = self._encoder.encode(x_SH)

        def place(rows: torch.Tensor) -> torch.Tensor:
            out = _garbage((len(self._own), num_rows, rows.shape[1]), rows)
            out[expert_S, row_S] = rows
            return out

        if self._encoder.dispatch_dtype is DispatchDtype.NVFP4 and scale is not None:
            swizzled = swizzle_128x4(place(scale.view(torch.uint8)))
            return place(codes).permute(1, 2, 0), mma_view(swizzled.view(scale.dtype))
        x_EMH = place(pad_columns(codes, ll_hidden_size(codes.shape[1])))[..., : codes.shape[1]]
        if scale is None:
            return x_EMH, None
        packed = pack_ue8m0(scale) if self._encoder.dispatch_dtype is DispatchDtype.FP8_UE8M0 else scale
        return x_EMH, place(packed).transpose(1, 2).contiguous().transpose(1, 2)  # M-major

    def combine(self, result: RowsCombineInput) -> torch.Tensor:
        token_S, expert_S, row_S, weight_S = self._slots
        rows_SH = result.hidden_states[expert_S, row_S].float() * weight_S[:, None]
        out_TH = rows_SH.new_zeros((self._num_tokens, rows_SH.shape[1]))
        return out_TH.index_add_(0, token_S, rows_SH)


class _Mori(_Rows):
    """A receive buffer with unused rows at the end, and global ids."""

    def __init__(
        self, config: MoeRunnerConfig, topology: Topology, encoder: _Encoder, dispatch_format: DispatchFormat
    ) -> None:
        super().__init__(config, topology, encoder)
        self._format = dispatch_format

    def dispatch(self, hidden_states_TH: torch.Tensor, topk_output: TopKOutput) -> MoriDispatchOutput:
        ids_TK, weights_TK = without_minus_one(topk_output, self._own.start)
        self._receive(ids_TK)
        rows = self._tokens_R
        x_RH, scale_RG = self._encoder.encode(hidden_states_TH[rows])
        return MoriDispatchOutput(
            self._format,
            _with_spare_rows(x_RH),
            None if scale_RG is None else _with_spare_rows(scale_RG),
            torch.nn.functional.pad(ids_TK[rows], (0, 0, 0, SPARE_ROWS), value=self._own.start),
            _with_spare_rows(weights_TK[rows]),
            torch.tensor([len(rows)], dtype=torch.int32, device=rows.device),
            ids_TK,
            weights_TK,
        )

    def combine(self, result: RowsCombineInput) -> torch.Tensor:
        return self._return(result.hidden_states[: len(self._tokens_R)])


class _Flashinfer(_Rows):
    """Rows for the tokens of every rank. Only rows of this rank are filled, and only for tokens with an expert here."""

    def dispatch(self, hidden_states_TH: torch.Tensor, topk_output: TopKOutput) -> FlashinferDispatchOutput:
        ids_TK, weights_TK = without_minus_one(topk_output, self._own.start)
        self._receive(ids_TK)
        tokens_R = self._tokens_R
        slots_R = self._topology.ep_rank * self._num_tokens + tokens_R
        num_slots = self._topology.ep_size * self._num_tokens

        def place(rows: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
            empty[slots_R] = rows[tokens_R]
            return empty

        x, scale = self._encoder.encode(hidden_states_TH)
        ids = place(ids_TK, ids_TK.new_full((num_slots, ids_TK.shape[1]), -1))
        weights = place(weights_TK, _garbage((num_slots, weights_TK.shape[1]), weights_TK))
        if scale is not None:
            scale_bytes = scale.view(torch.uint8)
            scale = place(scale_bytes, _garbage((num_slots, scale.shape[1]), scale_bytes))
        x = place(x, _garbage((num_slots, x.shape[1]), x))
        return FlashinferDispatchOutput(x, StandardTopK(weights, ids), scale)

    def combine(self, result: FlashinferCombineInput) -> torch.Tensor:
        return self._return(result.hidden_states[self._topology.ep_rank * self._num_tokens + self._tokens_R])


def _garbage(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Contents of unwritten memory: NaN in every float format, all ones in bytes and packed scales."""
    if like.dtype == torch.float8_e4m3fn:
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=like.device).view(like.dtype)
    if like.is_floating_point():
        return like.new_full(shape, float("nan"))
    return torch.full(shape, 0xFF if like.dtype == torch.uint8 else -1, dtype=like.dtype, device=like.device)


def _with_spare_rows(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat((rows, _garbage((SPARE_ROWS, rows.shape[1]), rows)))
