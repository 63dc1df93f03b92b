"""Records between transport and experts: the output of a dispatch and the input of a combine, by dispatch format.

Shape letters: T tokens, R received rows, H hidden, K top-k, E experts of this rank, M rows per expert.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from moe.config import DispatchFormat
from moe.routing import StandardTopK, TopKOutput
from moe.topology import Topology

Quantize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # [T, H] to codes [T, H/2], scales [T, H/16]


class MoeQuantInfo(Protocol):
    """Processed weights of one layer, made by a backend's `prepare`; immutable."""

    @property
    def topology(self) -> Topology:
        """The ranks that share the layer."""


class CombineInput(Protocol):
    """Expert outputs on their way back to the transport."""

    @property
    def format(self) -> DispatchFormat:
        """The dispatch format whose layout the result has."""

    @property
    def hidden_states(self) -> torch.Tensor:
        """Expert outputs, laid out as the dispatch format says."""

    @property
    def is_partial(self) -> bool:
        """True when other ranks hold the rest of the sum."""


class DispatchOutput(Protocol):
    """Dispatched tokens, from a transport to the experts."""

    @property
    def format(self) -> DispatchFormat:
        """Says how the tokens are laid out."""

    @property
    def hidden_states(self) -> torch.Tensor:
        """Tokens, in the layout of the format and the number format of the dispatch."""

    @property
    def hidden_states_scale(self) -> torch.Tensor | None:
        """Scales of quantized tokens; None in bf16."""

    @property
    def num_tokens(self) -> int | None:
        """Number of received tokens; None if only the device knows it."""

    def result(self, hidden_states: torch.Tensor, is_partial: bool) -> CombineInput:
        """The combine input that returns the expert outputs of these tokens.

        `is_partial`: other ranks hold the rest of the sum. Transports that add up the ranks' results ignore it.
        """


@dataclass(frozen=True, slots=True)
class StandardCombineInput:
    """Weighted sum over a token's local experts [T, H]; partial when other ranks hold the rest."""

    format: ClassVar[DispatchFormat] = DispatchFormat.STANDARD
    hidden_states: torch.Tensor
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class StandardDispatchOutput:
    """Tokens as they are: `hidden_states` [T, H] and their routing."""

    format: ClassVar[DispatchFormat] = DispatchFormat.STANDARD
    hidden_states: torch.Tensor
    topk_output: TopKOutput
    hidden_states_scale: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.hidden_states.shape[0]

    def result(self, hidden_states: torch.Tensor, is_partial: bool) -> StandardCombineInput:
        """[T, H]."""
        return StandardCombineInput(hidden_states, is_partial)


@dataclass(frozen=True, slots=True)
class RowsCombineInput:
    """Expert outputs by received row. The transport finds its dispatch again by the ids [T, K].

    deepep_normal, mori_normal, mori_ll: [R, H], the weighted sum over the local experts of every received token;
    the transport only adds. deepep_ll: [E, M, H], unweighted; the transport multiplies by `topk_weights`, adds, and
    never reads rows past an expert's count.
    """

    format: DispatchFormat
    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    is_partial: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class DeepepNormalDispatchOutput:
    """Tokens that have an expert here, each once: `hidden_states` [R, H], bf16 or e4m3 with fp32 scales [R, H/128].

    `topk_ids` int64 [R, K] are local ids, -1 for experts of other ranks; `topk_weights` fp32 [R, K]. The host list
    `num_recv_tokens_per_expert` is already rounded up to the alignment that was asked for.
    """

    format: ClassVar[DispatchFormat] = DispatchFormat.DEEPEP_NORMAL
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    num_recv_tokens_per_expert: list[int]

    @property
    def num_tokens(self) -> int:
        """R."""
        return self.hidden_states.shape[0]

    def result(self, hidden_states: torch.Tensor, is_partial: bool) -> RowsCombineInput:
        """[R, H], weighted."""
        del is_partial
        return RowsCombineInput(self.format, hidden_states, self.topk_ids, self.topk_weights)


@dataclass(frozen=True, slots=True)
class DeepepLlDispatchOutput:
    """Received rows per local expert: `hidden_states` [E, M, H], M = ranks * limit. Rows from `masked_m[e]` on are
    garbage, possibly NaN. NVFP4 tokens are packed as (M, H/2, E).

    Scales: fp32 [E, M, H/128], or int32 [E, M, H/512] with four exponent bytes each; both M-major.
    `topk_ids` int64 and `topk_weights` fp32 [T, K] belong to this rank's own tokens, for combine, not to these rows.
    `expected_m` is a hint: rows per expert if routing were even. `max_rows` is an upper bound for the real rows of all
    experts together; None if no bound below E_local * M is known.
    `hidden_states` may be a view of wider rows; results with the same strides are sent without a copy.
    """

    format: ClassVar[DispatchFormat] = DispatchFormat.DEEPEP_LL
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    masked_m: torch.Tensor
    expected_m: int
    max_rows: int | None = None

    @property
    def num_tokens(self) -> None:
        """Only the device knows."""
        return None

    def result(self, hidden_states: torch.Tensor, is_partial: bool) -> RowsCombineInput:
        """[E, M, H], or the same rows as [E * M, H], without weights."""
        del is_partial
        num_experts, hidden_size = self.masked_m.shape[0], hidden_states.shape[-1]
        rows_EMH = hidden_states.view(num_experts, -1, hidden_size)
        return RowsCombineInput(self.format, rows_EMH, self.topk_ids, self.topk_weights)


@dataclass(frozen=True, slots=True)
class MoriDispatchOutput:
    """Received tokens [R, H], R the whole receive buffer; only the first `num_recv_tokens` (int32 [1]) rows are real.

    `format` is mori_normal or mori_ll: the same layout from different kernels. `topk_ids` int32 [R, K] are global;
    `origin_*` [T, K] belong to this rank's own tokens, for combine.
    """

    format: DispatchFormat
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    num_recv_tokens: torch.Tensor
    origin_topk_ids: torch.Tensor
    origin_topk_weights: torch.Tensor

    @property
    def num_tokens(self) -> None:
        """Only the device knows."""
        return None

    def result(self, hidden_states: torch.Tensor, is_partial: bool) -> RowsCombineInput:
        """[R, H], weighted, with the sender's ids and weights."""
        del is_partial
        return RowsCombineInput(self.format, hidden_states, self.origin_topk_ids, self.origin_topk_weights)


@dataclass(frozen=True, slots=True)
class FlashinferCombineInput:
    """Weighted sum over the local experts [R, H]; the transport only adds."""

    format: ClassVar[DispatchFormat] = DispatchFormat.FLASHINFER
    hidden_states: torch.Tensor
    is_partial: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class FlashinferDispatchOutput:
    """Rows for the tokens of every rank: `hidden_states` [R, H] with R = ranks * limit, or packed NVFP4 [R, H/2]
    with its e4m3 scales [R, H/16]. `topk_output` has global ids; rows without a token here have id -1.
    """

    format: ClassVar[DispatchFormat] = DispatchFormat.FLASHINFER
    hidden_states: torch.Tensor
    topk_output: StandardTopK
    hidden_states_scale: torch.Tensor | None = None

    @property
    def num_tokens(self) -> None:
        """Only the device knows."""
        return None

    def result(self, hidden_states: torch.Tensor, is_partial: bool) -> FlashinferCombineInput:
        """[R, H], weighted."""
        del is_partial
        return FlashinferCombineInput(hidden_states)


@dataclass(slots=True)
class RunState:
    """State of one `run`: overlap arguments, and what the pre-permute passes to the post-permute."""

    overlap_args: object = None
    permute: object = None
