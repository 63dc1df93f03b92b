"""Latent attention (MLA, absorbed) by FlashInfer's kernels. Storing latents stays with `model.attention.triton`.

The library plans each step on the host: it divides queries and keys among the processors and copies the lists to the
device. It gets lengths in host memory, and page ids on the device, so that no plan waits for the device. A captured
step keeps one wrapper, whose buffers never move, and is planned anew before each replay.

Shape letters: T tokens of the step, B requests, H query heads, D key dim, V value dim, P pages of the longest request,
N pages of all requests together, S pages of the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from model.attention.base import BF16, AttentionDtypes, AttentionSpec, register_attention
from model.attention.triton import TritonAttention, TritonPlan
from model.batch import ForwardBatch, LayerKv
from model.errors import UnsupportedModelError
from moe.backends.flashinfer.common import library, missing_compiler, missing_release
from moe.device import num_processors

_OLDEST = (0, 7, 2)  # the first release with `MLAPlanMetadata`
_HOPPER = "sm90"
_LATENT_DIMS = (128, 256, 512)  # the widths of its matrix instructions
_ROPE_MULTIPLE = 64
_ROWS = 128  # queries times heads of one tile, which must hold whole queries
_MAX_TILES = 16384  # what a plan has room for, parts of long keys included
_WORKSPACE_BYTES = 128 << 20  # what the library recommends


@dataclass(frozen=True, slots=True)
class FlashInferPlan(TritonPlan):
    """`wrappers`: the library's, one for each kind of layer, planned for `table_BP` and the lengths of the step."""

    wrappers: dict[AttentionSpec, Any]
    table_BP: torch.Tensor
    page_size: int


@register_attention
class FlashInferAttention(TritonAttention):
    """Latent attention over a cache of the model's own type, bf16, on Hopper or newer."""

    name = "flashinfer"
    is_capturable = True
    plans_by_tables = True

    def __init__(self, specs: Sequence[AttentionSpec], device: torch.device, dtypes: AttentionDtypes = BF16) -> None:
        super().__init__(specs, device, dtypes)
        self._mla = library("mla")
        self._backend = "fa3" if self.arch == _HOPPER else "fa2"
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._indices_N: torch.Tensor | None = None  # of captured steps, which take turns
        # The library copies each plan from pinned memory of its own, which the next plan overwrites.
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """Heads of their own are faster in Triton; of latents it takes DeepSeek's sizes and a few more."""
        rope_dim = spec.key_dim - spec.value_dim
        if not spec.values_in_keys:
            return "it serves latent attention (MLA) alone"
        if spec.window is not None:
            return f"it has no sliding windows for latents, and a layer has one of {spec.window}"
        if spec.value_dim not in _LATENT_DIMS or rope_dim % _ROPE_MULTIPLE or not rope_dim:
            return (
                f"it serves latents of {', '.join(map(str, _LATENT_DIMS))} with a rope part of a multiple of "
                f"{_ROPE_MULTIPLE}, not {spec.value_dim} with {rope_dim}"
            )
        if _ROWS % spec.num_heads:
            return f"it serves numbers of query heads that divide {_ROWS}, not {spec.num_heads}"
        return super().unsupported_reason(spec, device)

    @classmethod
    def unusable_reason(cls, arch: str, dtypes: AttentionDtypes) -> str | None:
        """The GPU, then the types of numbers."""
        if not arch.startswith("sm") or int(arch[2:]) < int(_HOPPER[2:]):
            return f"it needs an NVIDIA GPU of {_HOPPER} or newer, not {arch}"
        if dtypes.model != torch.bfloat16:
            return f"it computes in bfloat16, and dtype is {dtypes.model}"
        if dtypes.kv != dtypes.model:
            return f"it reads a cache of bfloat16, and kv_cache_dtype is {dtypes.kv}"
        return None

    @classmethod
    def lacks(cls, device: torch.device) -> str | None:
        """The library and its compiler; Triton stores the latents."""
        return missing_release(_OLDEST) or missing_compiler() or super().lacks(device)

    @classmethod
    def not_chosen_reason(cls, specs: Sequence[AttentionSpec], arch: str) -> str | None:
        """Never, though its kernels alone are faster. Figures: benchmarks/results/two_cards_figures_h200x2.json."""
        return (
            "FlashInfer plans each step on the host, which costs an engine more than its kernels save: eight layers of "
            "DeepSeek-V3 on an H200 wrote 126 tokens/s instead of 439 in one stream, and 7,318 instead of 7,973 in 64"
        )

    def plan(self, batch: ForwardBatch) -> TritonPlan:
        """Plan a step that is not captured; one with more tiles than the library has room for runs in Triton."""
        plan = super().plan(batch)
        if not self._has_room(batch):
            return plan
        return self._planned(plan, batch, {spec: self._new_wrapper() for spec in self.specs}, batch.seq_lens)

    def plan_for_graph(self, batch: ForwardBatch) -> TritonPlan:
        """Each captured step has buffers of its own, but for the page ids, which are written before each replay."""
        plan = super().plan_for_graph(batch)
        if not self._has_room(batch):
            return plan
        num_rows, capacity = batch.page_table_BP.shape[0], batch.page_table_BP.numel()
        if self._indices_N is None or len(self._indices_N) < capacity:
            self._indices_N = torch.zeros(capacity, dtype=torch.int32, device=self.device)
        wrappers = {spec: self._new_wrapper(num_rows, self._indices_N) for spec in self.specs}
        # The step runs once before it is captured. The batch's host-side lengths, the longest there may be, would make
        # that slow, and its device-side ones are not known here.
        return self._planned(plan, batch, wrappers, tuple(max(1, length) for length in batch.query_lens))

    def update_plan(self, plan: TritonPlan, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> None:
        """Plan the captured step anew; its grid stays, since that depends on tokens and rows alone."""
        if isinstance(plan, FlashInferPlan):
            self._fill(plan, query_lens, seq_lens)

    def _has_room(self, batch: ForwardBatch) -> bool:
        """Whether a plan holds every step of so many tokens and rows."""
        num_rows = len(batch.query_lens)
        for spec in self.specs:
            num_queries = batch.num_tokens * spec.num_heads
            tile = _ROWS if num_queries // num_rows > _ROWS // 2 else _ROWS // 2  # as the library chooses it
            if num_queries // tile + num_rows + num_processors(self.device, 1) > _MAX_TILES:
                return False
        return True

    def _new_wrapper(self, num_rows: int = 0, indices_N: torch.Tensor | None = None) -> Any:
        """A wrapper of the library; with `indices_N` for a captured step of `num_rows` requests."""
        if indices_N is None:
            return self._mla.BatchMLAPagedAttentionWrapper(self._workspace, backend=self._backend)

        def buffer(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int32, device=self.device)

        return self._mla.BatchMLAPagedAttentionWrapper(
            self._workspace, use_cuda_graph=True, qo_indptr=buffer(num_rows + 1), kv_indptr=buffer(num_rows + 1),
            kv_indices=indices_N, kv_len_arr=buffer(num_rows), backend=self._backend,
        )  # fmt: skip

    def _planned(
        self, plan: TritonPlan, batch: ForwardBatch, wrappers: dict[AttentionSpec, Any], seq_lens: tuple[int, ...]
    ) -> FlashInferPlan:
        made = FlashInferPlan(
            plan.batches, plan.has_decodes, plan.has_prompts, wrappers, batch.page_table_BP, batch.page_size
        )
        self._fill(made, batch.query_lens, seq_lens)
        return made

    def _fill(self, plan: FlashInferPlan, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> None:
        """Plan every wrapper for rows of these lengths and the pages that the table has now."""
        num_pages = [-(-length // plan.page_size) for length in seq_lens]
        metadata = self._mla.MLAPlanMetadata.csr(
            qo_indptr=self._on_host([0, *accumulate(query_lens)]),
            kv_indptr=self._on_host([0, *accumulate(num_pages)]),
            kv_indices=self._page_ids(plan.table_BP, num_pages),
            kv_len_arr=self._on_host(seq_lens),
        )
        if self._copied is not None:
            self._copied.synchronize()  # a step that still runs has begun with its copy, so this hardly waits
        for spec, wrapper in plan.wrappers.items():
            wrapper.plan(
                metadata=metadata, num_heads=spec.num_heads, head_dim_ckv=spec.value_dim,
                head_dim_kpe=spec.key_dim - spec.value_dim, page_size=plan.page_size, causal=True,
                sm_scale=spec.scale, q_data_type=self.dtypes.model, kv_data_type=self.dtypes.kv,
                query_layout="packed", kv_cache_layout="packed",
            )  # fmt: skip
        if self._copied is not None:
            self._copied.record()

    def _page_ids(self, table_BP: torch.Tensor, num_pages: Sequence[int]) -> torch.Tensor:
        """The first `num_pages[b]` ids of each row, one row after the other, int32 [N], made on the device."""
        total, width = sum(num_pages), table_BP.shape[1]
        starts = [0, *accumulate(num_pages)]
        # Place of a row's first page in the table, less its place in the result.
        shifts = [row * width - start for row, start in enumerate(starts[:-1])]
        shifts_B, num_pages_B = self._on_host([*shifts, *num_pages]).to(self.device, non_blocking=True).chunk(2)
        places_N = torch.arange(total, dtype=torch.int32, device=self.device)
        places_N += shifts_B.repeat_interleave(num_pages_B, output_size=total)
        return table_BP.reshape(-1).index_select(0, places_N)

    def _on_host(self, numbers: Sequence[int]) -> torch.Tensor:
        """int32 in pinned memory, from which a copy to the device does not wait."""
        return torch.tensor(numbers, dtype=torch.int32, pin_memory=self.device.type == "cuda")

    def _attend_latents(
        self, spec: AttentionSpec, plan: TritonPlan, kv: LayerKv, q_THD: torch.Tensor, sinks_H: torch.Tensor | None,
        formats: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        """By the plan of the library; a step that it did not plan is attended in Triton."""
        if sinks_H is not None:
            raise UnsupportedModelError(
                f"attention backend {self.name}: it has no sinks for latent attention; choose triton or torch"
            )
        if not isinstance(plan, FlashInferPlan):
            return super()._attend_latents(spec, plan, kv, q_THD, sinks_H, formats)
        out_THV = q_THD.new_empty(q_THD.shape[0], spec.num_heads, spec.value_dim)
        keys_SPD = kv.keys.view(-1, plan.page_size, spec.key_dim)
        result: torch.Tensor = plan.wrappers[spec].run(query=q_THD, kv_cache=keys_SPD, out=out_THV)
        return result
