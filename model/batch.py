"""`ForwardBatch`: everything one forward pass needs besides weights and the KV cache. Built by the engine, read-only.

Shape letters: T tokens of this step (all requests flattened), B requests, P pages of the longest request, R logit rows.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """One step: each request contributes `query_lens[b]` consecutive tokens, whose keys end at `seq_lens[b]`.

    A decode step has every query length 1; prefill chunks and decodes may be mixed in any order.
    `sliding` is the same step as layers with a window see it, where those have pages of their own (`for_window`): it
    differs in `slots_T` and `page_table_BP` alone. Its table says nothing of pages below every window of the step.
    `all_ranks_decode`: every rank runs a decode step and none has more tokens than the transport takes in low latency.
    """

    input_ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64, position of the token in its request
    slots_T: torch.Tensor  # int64, flat KV slot (page * page_size + offset) the token's keys are written to
    query_start_B1: torch.Tensor  # int32 [B+1], prefix sums of the query lengths
    seq_lens_B: torch.Tensor  # int32, keys visible to the request's last token (cached + this step)
    page_table_BP: torch.Tensor  # int32 page ids, padded with 0
    logit_rows_R: torch.Tensor  # int64, rows of T whose logits are wanted
    query_lens: tuple[int, ...]  # the same numbers on the host
    seq_lens: tuple[int, ...]
    page_size: int
    sliding: "ForwardBatch | None" = None
    wants_all_rows: bool = False  # `logit_rows_R` names all tokens in order, so nothing has to be picked
    all_ranks_decode: bool = False  # ranks that share experts must agree on it; False is right for every step
    max_rank_tokens: int | None = None  # largest T of any rank in this step; None: not known
    num_live: torch.Tensor | None = None  # int32 [1]: the tokens after these are padding of a captured step; None: all

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.input_ids_T.shape[0]

    @property
    def is_decode(self) -> bool:
        """True when every request contributes exactly one token."""
        return len(self.query_lens) == self.num_tokens

    def for_window(self, window: int | None) -> "ForwardBatch":
        """The batch with the slots and pages of layers with this window; None: of layers without one."""
        return self if window is None or self.sliding is None else self.sliding


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLayerSpec:
    """What one attention layer stores per token: `num_heads` vectors of `key_dim` and of `value_dim` numbers.

    MLA stores one head: the normed latent and the rotated key in the key part, nothing in the value part.
    `window` is the number of tokens a query sees, itself included; None for all.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class LayerKv:
    """Paged cache of one layer: `keys` [num_slots, heads, key_dim], `values` [num_slots, heads, value_dim]."""

    keys: torch.Tensor
    values: torch.Tensor
