"""`Model`: embedding, decoder layers, final norm and logits, the same for every family. Inference only.

The life of a forward pass, and the file of each step:

    engine/runner.py             the scheduler's choice as a `ForwardBatch` (batch.py): ids, positions, KV slots
    decoder.py Model             embedding (embedding.py), rotations of this step's positions (rope.py), attention plan
      DecoderLayer, each layer
        norm.py                  adds the delta of the part before to the residual stream, then RMS norm
        families/<family>.py     q, k, v or the latent: projections (linear.py), rotated (rope.py)
        attention/<backend>.py   writes keys and values to their slots in the paged cache, then attends
        families/<family>.py     output projection: the delta of attention
        norm.py                  adds it, then RMS norm
        moe_layer.py             a layer of experts, else a dense MLP (linear.py):
          Gate, moe/routing.py     router logits, then top-k ids and weights; on a GPU moe/kernels/router.py
          moe/dispatch/*.py        tokens go to the ranks that own their experts
          moe/runner.py            the path of (transport, backend), chosen when the model was built
          moe/backends/<family>/   permute, both GEMMs with the gated activation between them, finalize
          moe/dispatch/*.py        combine: back to their ranks, or a sum over ranks
          linear.py                shared experts, added unscaled
    decoder.py Model             final norm of the rows whose logits are wanted, output head (embedding.py): fp32 logits
    engine/sampler.py            logits to tokens

On several ranks (parallel.py), sums over ranks (moe/group.py) follow the embedding, the output projection, a dense MLP
and the experts; the norm that follows adds their parts up (`PartialSum`). The head gathers its logits.

Families build the parts of a layer; `load.py` reads them in this order, `moe_build.py` chooses the path of the experts.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from model.attention.base import Attention, AttentionSpec
from model.balance import ExpertBalance
from model.batch import ForwardBatch, KvLayerSpec, LayerKv
from model.embedding import Embedding, OutputHead
from model.layer import Layer
from model.moe_layer import MoeLayer
from model.norm import RmsNorm
from model.rope import RotaryTable
from moe.group import PartialSum, RankGroups, TokenMail


@dataclass(frozen=True, slots=True)
class StepState:
    """What every layer of one step shares: the attention plan, the rotation of each token, complex64 [T, 1, D/2],
    whether all ranks that share experts decode, the tokens of the rank that has most (None if no layer asks), and how
    many tokens are not padding, int32 [1] on the device (None: all).
    """

    plan: Any
    rotation_T1D: torch.Tensor
    all_ranks_decode: bool
    max_rank_tokens: int | None = None
    num_live: torch.Tensor | None = None


class AttentionLayer(Layer, ABC):
    """Projections, rope and attention of one layer: `forward(x_TH, step, kv) -> [T, H]`."""

    spec: AttentionSpec

    @abstractmethod
    def forward(self, x_TH: torch.Tensor, step: StepState, kv: LayerKv) -> torch.Tensor | PartialSum:
        """[T, H] to [T, H]; writes the step's keys to `kv`."""


class DecoderLayer(Layer):
    """Pre-norm block: `x + attention(norm(x))`, then `x + mlp(norm(x))`; `mlp` is a MoE layer or a dense one."""

    def __init__(self, *, input_norm: RmsNorm, attention: AttentionLayer, mlp_norm: RmsNorm, mlp: Layer) -> None:
        super().__init__()
        self.input_norm = input_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(
        self, x_TH: torch.Tensor | None, delta_TH: torch.Tensor | PartialSum, step: StepState, kv: LayerKv
    ) -> tuple[torch.Tensor, torch.Tensor | PartialSum]:
        """Takes and returns the residual stream and the delta that is not yet added to it; all [T, H].

        The next norm adds the delta, because addition and norm, with the sum over ranks, are one kernel on GPUs. The
        first layer gets the embedding as a delta to nothing.
        """
        x_TH, normed_TH = self.input_norm.add(x_TH, delta_TH)
        x_TH, normed_TH = self.mlp_norm.add(x_TH, self.attention(normed_TH, step, kv))
        if not isinstance(self.mlp, MoeLayer):
            return x_TH, self.mlp(normed_TH)
        return x_TH, self.mlp(
            normed_TH,
            is_decode=step.all_ranks_decode,
            max_rank_tokens=step.max_rank_tokens,
            num_live=step.num_live,
        )


class Model(Layer):
    """A loaded model, or one rank's part of it. Call under `torch.inference_mode()`.

    The ranks of `groups.tp` run the same batches at the same time, and all get the whole logits. Those of `groups.dp`
    run batches of their own at the same time, since they share the experts; one that has none calls `run_idle`.
    """

    def __init__(
        self,
        *,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        norm: RmsNorm,
        head: OutputHead,
        rope: RotaryTable,
        attention: Attention,
        groups: RankGroups,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        balance: ExpertBalance | None = None,
    ) -> None:
        """`balance`: the counters of the experts and, where they have replicas, their placement."""
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.head = head
        self.rope = rope
        self.attention = attention
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.groups = groups
        self.balance = balance
        self.vocab_size = vocab_size
        self.dtype = embedding.weight.dtype
        self.device = embedding.weight.device
        self.kv_specs: list[KvLayerSpec] = [layer.attention.spec.kv_spec for layer in layers]
        self.moe_layers: list[MoeLayer] = [layer.mlp for layer in layers if isinstance(layer.mlp, MoeLayer)]

    def why_not_capturable(self, max_num_tokens: int) -> str | None:
        """None if decode steps of up to `max_num_tokens` tokens can be captured in CUDA graphs, else what cannot."""
        if not self.attention.is_capturable:
            return f"attention backend {self.attention.name}"
        if not self.groups.tp.is_capturable:
            return "collectives over gloo"
        reasons = (layer.why_not_capturable(max_num_tokens) for layer in self.moe_layers)
        return next((reason for reason in reasons if reason is not None), None)

    @property
    def asks_num_live(self) -> bool:
        """Whether a layer has to know how many tokens of a captured step are not padding."""
        return self.balance is not None or any(layer.gathers_tokens for layer in self.moe_layers)

    @property
    def can_compile_ahead(self) -> bool:
        """Whether a step harms nothing while Triton kernels are only compiled.

        They then leave their outputs as they were, and no other library may take such numbers for ids of experts.
        """
        return all(layer.has_own_kernels for layer in self.moe_layers)

    @property
    def plans_by_tables(self) -> bool:
        """Whether `update_plan` reads the page tables of the batch that `plan_for_graph` got."""
        return self.attention.plans_by_tables

    @property
    def token_mail(self) -> TokenMail | None:
        """How the ranks of `groups.tp` can get the tokens that the first of them chose; None if no kernel can do it."""
        return self.groups.tp.mail

    def prepare_replay(self) -> None:
        """What cannot be part of a captured step; every rank calls it before each capture and replay, outside them."""
        for layer in self.moe_layers[:1]:  # all share one transport
            layer.dispatcher.prepare_replay()

    def plan(self, batch: ForwardBatch) -> Any:
        """The attention plan of a batch. Make it outside a captured graph: it may wait for the device."""
        return self.attention.plan(batch)

    def plan_for_graph(self, batch: ForwardBatch) -> Any:
        """The attention plan of a step to be captured, whose rows may have other lengths in each replay."""
        return self.attention.plan_for_graph(batch)

    def update_plan(self, plan: Any, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> None:
        """Bring a plan for a graph up to date with the lengths of its rows, before each replay."""
        self.attention.update_plan(plan, query_lens, seq_lens)

    def forward(
        self, batch: ForwardBatch, plan: Any, kv: Sequence[LayerKv], logits_RV: torch.Tensor | None = None
    ) -> torch.Tensor:
        """fp32 logits [R, V] of the rows the batch asks for; writes the step's keys and values to `kv`, one a layer.

        `plan` is what `plan` made of the same batch. The logits go to `logits_RV` if it is given.
        """
        max_rank_tokens = self._max_rank_tokens(batch.num_tokens, batch.max_rank_tokens)
        step = StepState(plan, self.rope.at(batch.positions_T), batch.all_ranks_decode, max_rank_tokens, batch.num_live)
        x_TH: torch.Tensor | None = None
        delta_TH: torch.Tensor | PartialSum = self.embedding(batch.input_ids_T)
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            x_TH, delta_TH = layer(x_TH, delta_TH, step, layer_kv)
        if not batch.wants_all_rows:
            rows_R = batch.logit_rows_R
            x_TH = None if x_TH is None else x_TH.index_select(0, rows_R)
            delta_TH = delta_TH.rows(rows_R) if isinstance(delta_TH, PartialSum) else delta_TH.index_select(0, rows_R)
        logits_RV = self.head(self.norm.add(x_TH, delta_TH)[1], logits_RV)
        return logits_RV

    def run_idle(self, max_rank_tokens: int | None = None, all_ranks_decode: bool = False) -> None:
        """Take part in a step of the other data-parallel ranks without tokens: the MoE layers alone, no cache."""
        max_rank_tokens = self._max_rank_tokens(0, max_rank_tokens)
        hidden_size = self.embedding.weight.shape[1]
        for layer in self.moe_layers:
            x_TH = torch.empty((0, hidden_size), dtype=self.dtype, device=self.device)
            layer(x_TH, is_decode=all_ranks_decode, max_rank_tokens=max_rank_tokens)

    def _max_rank_tokens(self, num_tokens: int, agreed: int | None) -> int | None:
        """Tokens of the rank that has most, if a layer asks; `agreed`: the number if the ranks know it already."""
        if agreed is not None or not any(layer.gathers_tokens for layer in self.moe_layers):
            return agreed
        return int(self.groups.dp.max([float(num_tokens)])[0])
