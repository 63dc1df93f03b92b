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


@dataclass(slots=True)
class RunState:
    """What one `run` carries besides its data: overlap arguments and the path's own permute record."""

    overlap_args: Any = None
    permute: Any = field(default=None)
