"""Typed hand-overs between routing, transport and experts. One pair of records per dispatch format.

Shape letters: T tokens, H hidden, K top-k, E experts (global).
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

from moe.config import DispatchFormat, RoutingConfig


@dataclass(frozen=True, slots=True)
class StandardTopK:
    """Chosen experts: fp32 `weights` [T, K] (scaling factor included) and int32 global `ids` [T, K], -1 = none."""

    weights: torch.Tensor
    ids: torch.Tensor

    def to_standard(self) -> "StandardTopK":
        """Already standard; lets callers treat both forms alike."""
        return self


@dataclass(frozen=True, slots=True)
class BypassedTopK:
    """Routing left to a kernel that routes inside: `logits` [T, E], the rules and the fp32 correction bias [E]."""

    logits: torch.Tensor
    config: RoutingConfig
    correction_bias: torch.Tensor | None = None

    def to_standard(self) -> StandardTopK:
        """Route here, for kernels that want ids and weights."""
        from moe.routing import route  # routing imports these records

        return route(self.logits, self.config, self.correction_bias)


TopKOutput = StandardTopK | BypassedTopK


class DispatchOutput(Protocol):
    """What a transport hands to the experts."""

    format: ClassVar[DispatchFormat]

    @property
    def num_tokens(self) -> int | None:
        """Received tokens if the host knows them; None if only the device does."""

    def empty_result(self, dtype: torch.dtype) -> "CombineInput":
        """The combine input of zero tokens, with the original ids."""


class CombineInput(Protocol):
    """What the experts hand back to the transport."""

    format: ClassVar[DispatchFormat]

    @property
    def hidden_states(self) -> torch.Tensor:
        """Expert outputs, laid out as the dispatch format says."""

    @property
    def is_partial(self) -> bool:
        """True when other ranks hold the rest of the sum."""


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

    def empty_result(self, dtype: torch.dtype) -> "StandardCombineInput":
        """[0, H] in the output dtype; complete, since nothing is left to sum."""
        return StandardCombineInput(self.hidden_states.new_empty((0, self.hidden_states.shape[1]), dtype=dtype))


@dataclass(frozen=True, slots=True)
class StandardCombineInput:
    """Weighted sum over a token's local experts [T, H]; partial when other ranks hold the rest."""

    format: ClassVar[DispatchFormat] = DispatchFormat.STANDARD
    hidden_states: torch.Tensor
    is_partial: bool = False


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

    def empty_result(self, dtype: torch.dtype) -> "DeepepNormalCombineInput":
        """[0, H]: this rank takes part in the combine with nothing."""
        hidden_states = self.hidden_states.new_empty((0, self.hidden_states.shape[1]), dtype=dtype)
        return DeepepNormalCombineInput(hidden_states, self.topk_ids, self.topk_weights)


@dataclass(frozen=True, slots=True)
class DeepepNormalCombineInput:
    """Weighted sum over the local experts of every received token [R, H]: the transport adds ranks without weights."""

    format: ClassVar[DispatchFormat] = DispatchFormat.DEEPEP_NORMAL
    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class DeepepLlDispatchOutput:
    """Received rows per local expert: `hidden_states` [E_local, M, H], M = ranks * limit; rows from `masked_m[e]` on
    are garbage, NaN included.

    Scales: fp32 [E_local, M, H/128], or int32 [E_local, M, H/512] with four exponent bytes each; M-major both.
    `topk_ids` int64 and `topk_weights` fp32 [T, K] are the sender's own, for combine; they say nothing of these rows.
    `expected_m` is a hint: rows per expert if routing were even. `max_rows` is a bound: real rows of all experts
    together; None if nothing less than E_local * M is known.
    `hidden_states` may be a view of wider rows; results written with the same strides travel without a copy.
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

    def empty_result(self, dtype: torch.dtype) -> "DeepepLlCombineInput":
        """Zeros of the full shape."""
        return DeepepLlCombineInput(torch.zeros_like(self.hidden_states, dtype=dtype), self.topk_ids, self.topk_weights)


@dataclass(frozen=True, slots=True)
class DeepepLlCombineInput:
    """Expert outputs [E_local, M, H] without weights: the transport multiplies by `topk_weights` and adds.

    It never reads the rows beyond an expert's count, so they may hold anything.
    """

    format: ClassVar[DispatchFormat] = DispatchFormat.DEEPEP_LL
    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class MoriNormalDispatchOutput:
    """Received tokens [R, H], R the whole receive buffer; only the first `num_recv_tokens` (int32 [1]) rows are real.

    `topk_ids` int32 [R, K] stay global; `origin_*` [T, K] are the sender's own, for combine.
    """

    format: ClassVar[DispatchFormat] = DispatchFormat.MORI_NORMAL
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    num_recv_tokens: torch.Tensor
    origin_topk_ids: torch.Tensor
    origin_topk_weights: torch.Tensor
    out_dtype: torch.dtype

    @property
    def num_tokens(self) -> None:
        """Only the device knows."""
        return None

    def empty_result(self, dtype: torch.dtype) -> "MoriNormalCombineInput":
        """Zeros of the full shape."""
        return MoriNormalCombineInput(
            torch.zeros_like(self.hidden_states, dtype=dtype), self.origin_topk_ids, self.origin_topk_weights
        )


@dataclass(frozen=True, slots=True)
class MoriNormalCombineInput:
    """Weighted sum over the local experts [R, H], with the sender's ids and weights; ranks are added unweighted."""

    format: ClassVar[DispatchFormat] = DispatchFormat.MORI_NORMAL
    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class MoriLlDispatchOutput(MoriNormalDispatchOutput):
    """The same layout from mori's low-latency kernels."""

    format: ClassVar[DispatchFormat] = DispatchFormat.MORI_LL

    def empty_result(self, dtype: torch.dtype) -> "MoriLlCombineInput":
        """Zeros of the full shape."""
        return MoriLlCombineInput(
            torch.zeros_like(self.hidden_states, dtype=dtype), self.origin_topk_ids, self.origin_topk_weights
        )


@dataclass(frozen=True, slots=True)
class MoriLlCombineInput(MoriNormalCombineInput):
    """The same layout for mori's low-latency kernels."""

    format: ClassVar[DispatchFormat] = DispatchFormat.MORI_LL


@dataclass(frozen=True, slots=True)
class FlashinferDispatchOutput:
    """Slots for the tokens of every rank: `hidden_states` [R, H] with R = ranks * limit, or packed NVFP4 [R, H/2]
    with its e4m3 scales [R, H/16]. `topk_output` has global ids; slots without a token here have id -1.
    """

    format: ClassVar[DispatchFormat] = DispatchFormat.FLASHINFER
    hidden_states: torch.Tensor
    topk_output: StandardTopK
    hidden_states_scale: torch.Tensor | None = None

    @property
    def num_tokens(self) -> None:
        """Only the device knows."""
        return None

    def empty_result(self, dtype: torch.dtype) -> "FlashinferCombineInput":
        """Zeros of the full shape."""
        num_packed = 1 if self.hidden_states_scale is None else 2
        shape = (self.hidden_states.shape[0], self.hidden_states.shape[1] * num_packed)
        return FlashinferCombineInput(self.hidden_states.new_zeros(shape, dtype=dtype))


@dataclass(frozen=True, slots=True)
class FlashinferCombineInput:
    """Weighted sum over the local experts [R, H]; the transport adds ranks without weights."""

    format: ClassVar[DispatchFormat] = DispatchFormat.FLASHINFER
    hidden_states: torch.Tensor
    is_partial: bool = False


@dataclass(slots=True)
class RunState:
    """What one `run` carries besides its data: overlap arguments and the path's own permute record."""

    overlap_args: Any = None
    permute: Any = field(default=None)
