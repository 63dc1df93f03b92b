"""DeepEP: one buffer per rank for all layers, and a thin dispatcher per layer that supports both modes.

Low latency multiplies by the router weights when it combines; normal mode adds the ranks' results as they are.
Shape letters: T this rank's tokens, R received tokens, K top-k, E local experts, M = ranks * limit, H hidden.
"""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from moe.config import DispatchDtype, DispatchFormat, MoeA2ABackend
from moe.dispatch.base import InFlight, accepted, ids_and_weights, load_library, pad_columns
from moe.dispatch.beside_gemm import CombineBesideGemm
from moe.dispatch.deepep_settings import (
    QUEUE_DEPTH_VARIABLE,
    DeepepMode,
    DeepepSettings,
    EpShape,
    check_deepep,
    check_queue_depth,
    expected_rows,
    ll_hidden_size,
    most_received_rows,
    queue_depth_to_ask_for,
    why_not_capturable,
)
from moe.errors import MoeConfigError, TransportStateError, UnsupportedPathError
from moe.formats.token_groups import quantize_token_groups
from moe.overlap import DownGemmOverlap
from moe.routing import TopKOutput
from moe.types import DeepepLlDispatchOutput, DeepepNormalDispatchOutput, RowsCombineInput

RESULTS_ALIVE = 2  # the low-latency buffer is a double buffer
NAN = float("nan")


class DeepepBuffer:
    """The communication buffer of one rank, shared by all its layers, and the batches in flight in it.

    Every low-latency call uses the next half of a double buffer. The library counts calls on the host, including calls
    that are only captured or that fail on the device, and each call zeroes the counters of the other half. Captured
    steps expect the halves as they are after an even number of calls. An odd number with nothing in flight means that
    an exchange stopped half-way; all ranks must then zero the counters together.

    Raises:
        UnsupportedPathError, MoeConfigError: the settings break a limit of the kernels, or the library is missing.
            Raised before anything is allocated, except for the queue depth, which only the buffer knows.
    """

    transport: ClassVar[MoeA2ABackend] = MoeA2ABackend.DEEPEP
    can_clean: ClassVar[bool] = True  # whether the library can zero its counters

    def __init__(
        self, group: Any, settings: DeepepSettings, shape: EpShape, *, sends_fp8: bool, row_multiple: int = 4
    ) -> None:
        """`group` is the process group of the expert-parallel ranks; for `row_multiple` see `check_deepep`."""
        check_deepep(settings, shape, sends_fp8=sends_fp8, row_multiple=row_multiple)
        if group.size() != shape.ep_size:
            raise MoeConfigError(f"--expert-parallel-size is {shape.ep_size}, but the group has {group.size()} ranks")
        self.settings = settings
        self.shape = shape
        self.raw: Any = self.build(group)
        check_queue_depth(settings, getattr(self.raw, "nvshmem_qp_depth", None))
        self.in_flight: InFlight[Any] = InFlight(self.transport, RESULTS_ALIVE)
        self._needs_cleaning = False
        self._is_odd = False
        self._device = torch.device("cpu")

    def build(self, group: Any) -> Any:
        """Make the library's buffer for the modes in use. Subclasses adapt other libraries to DeepEP's calls."""
        library = load_library("deep_ep", self.transport)
        mode, shape, buffer_class = self.settings.mode, self.shape, library.Buffer
        num_nvl_bytes = num_rdma_bytes = num_qps = 0
        queue_depth = queue_depth_to_ask_for(self.settings)
        if queue_depth is not None:  # a value that the user chose stays
            os.environ.setdefault(QUEUE_DEPTH_VARIABLE, str(queue_depth))
        if mode.has_normal:
            row_bytes = shape.hidden_size * 2
            for config in (
                buffer_class.get_dispatch_config(shape.ep_size),
                buffer_class.get_combine_config(shape.ep_size),
            ):
                num_nvl_bytes = max(num_nvl_bytes, config.get_nvl_buffer_size_hint(row_bytes, shape.ep_size))
                num_rdma_bytes = max(num_rdma_bytes, config.get_rdma_buffer_size_hint(row_bytes, shape.ep_size))
            num_qps = buffer_class.num_sms
        if mode.has_low_latency:
            hint = buffer_class.get_low_latency_rdma_size_hint(
                self.settings.max_dispatch_tokens, ll_hidden_size(shape.hidden_size), shape.ep_size, shape.num_experts
            )
            num_rdma_bytes, num_qps = max(num_rdma_bytes, hint), max(num_qps, shape.num_local_experts)
        return buffer_class(
            group, num_nvl_bytes, num_rdma_bytes, low_latency_mode=mode.has_low_latency, num_qps_per_rank=num_qps
        )

    @property
    def can_send_nvfp4(self) -> bool:
        """True if low-latency dispatch has the NVFP4 option in the installed build."""
        return "use_nvfp4" in inspect.signature(self.raw.low_latency_dispatch).parameters

    def prepare_low_latency(self) -> None:
        """Zero the counters if they may be dirty: after normal kernels, and after an exchange that stopped half-way.

        All ranks call it at the same point, because the library waits for all of them.

        Raises:
            TransportStateError: called during a capture, where every replay would repeat the cleaning.
        """
        is_half_done = self._is_odd and not len(self.in_flight)
        if not self._needs_cleaning and not is_half_done:
            return
        if is_capturing():
            raise TransportStateError(
                f"{self.transport}: the low-latency buffer must be cleaned before a capture, not in it: call "
                "prepare_replay first"
            )
        self._clean()
        if is_half_done:
            self._send_nothing()
            self._clean()

    def _clean(self) -> None:
        if not self.can_clean:
            raise TransportStateError(
                f"{self.transport}: an exchange was left half done, and this library cannot clean its buffer: restart "
                "all ranks"
            )
        self.raw.clean_low_latency_buffer(
            self.settings.max_dispatch_tokens, ll_hidden_size(self.shape.hidden_size), self.shape.num_experts
        )
        self._needs_cleaning = False

    def _send_nothing(self) -> None:
        """Make one more call, so that captured steps find the halves in the order of the capture."""
        x_0H = torch.empty(0, ll_hidden_size(self.shape.hidden_size), dtype=torch.bfloat16, device=self._device)
        ids_0K = torch.empty(0, self.shape.top_k, dtype=torch.int64, device=self._device)
        self.low_latency_dispatch(x_0H, ids_0K, use_fp8=False)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Wrap a low-latency call. If it fails, the counters may be dirty, unless it was only captured."""
        self._is_odd = not self._is_odd
        try:
            yield
        except Exception:
            self._needs_cleaning |= not is_capturing()
            raise

    def low_latency_dispatch(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, **options: Any) -> tuple[Any, Any, Any]:
        """Send, and wait for the arrival: (received tokens, rows of each expert, handle)."""
        limit, num_experts, self._device = self.settings.max_dispatch_tokens, self.shape.num_experts, x_TH.device
        with self._counted():
            received, masked_m, handle, _, hook = self.raw.low_latency_dispatch(
                x_TH, ids_TK, limit, num_experts, return_recv_hook=True, **options
            )
            hook()  # waits for the arrival: the call above only sends
        return received, masked_m, handle

    def low_latency_combine(
        self, x_EMH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, handle: Any, **options: Any
    ) -> torch.Tensor:
        """Send the results, and wait for the sums [T, H]."""
        out_TH: torch.Tensor
        with self._counted():
            out_TH, _, hook = self.raw.low_latency_combine(
                x_EMH, ids_TK, weights_TK, handle, return_recv_hook=True, **options
            )
            hook()
        return out_TH

    def after_normal(self) -> None:
        """Remember that normal kernels used the buffer."""
        self._needs_cleaning = self.settings.mode.has_low_latency


class DeepepDispatcher:
    """Dispatch and combine of one layer over a shared buffer."""

    def __init__(
        self,
        buffer: DeepepBuffer,
        dispatch_dtype: DispatchDtype,
        *,
        expert_alignment: int = 1,
        input_multiplier: torch.Tensor | None = None,
        beside_gemm: CombineBesideGemm | None = None,
    ) -> None:
        """`input_multiplier`: reciprocal of the layer's static input scale, fp32 [1]; needed to dispatch NVFP4.

        `beside_gemm`: lets a low-latency combine run beside the experts' second GEMM.
        """
        if dispatch_dtype is DispatchDtype.NVFP4:
            if buffer.settings.mode is not DeepepMode.LOW_LATENCY or not buffer.can_send_nvfp4:
                raise UnsupportedPathError(
                    "an NVFP4 dispatch needs --deepep-mode low_latency and a deep_ep build with the option use_nvfp4"
                )
            if ll_hidden_size(buffer.shape.hidden_size) != buffer.shape.hidden_size:
                raise UnsupportedPathError(
                    f"hidden size {buffer.shape.hidden_size}: an NVFP4 dispatch cannot be padded; send bf16"
                )
            if input_multiplier is None:
                raise MoeConfigError("an NVFP4 dispatch needs the layer's static input scale")
        self.buffer = buffer
        self.dispatch_dtype = dispatch_dtype
        self._expert_alignment = expert_alignment
        self._input_multiplier = input_multiplier
        self._beside_gemm = beside_gemm
        self._low_latency_options = self._dtype_options() if buffer.settings.mode.has_low_latency else {}

    def dispatch(
        self, hidden_states_TH: torch.Tensor, topk_output: TopKOutput, *, is_decode: bool = False
    ) -> DeepepNormalDispatchOutput | DeepepLlDispatchOutput:
        """Send tokens to their experts. In mode `auto` every rank must pass the same `is_decode`."""
        ids_TK, weights_TK = ids_and_weights(topk_output, torch.int64)
        mode = self.buffer.settings.mode
        if mode is DeepepMode.LOW_LATENCY or (mode is DeepepMode.AUTO and is_decode):
            return self._dispatch_low_latency(hidden_states_TH, ids_TK, weights_TK)
        return self._dispatch_normal(hidden_states_TH, ids_TK, weights_TK)

    def begin_overlap(
        self, dispatched: DeepepNormalDispatchOutput | DeepepLlDispatchOutput
    ) -> DownGemmOverlap | None:  # fmt: skip
        """Arguments of the runner with which `combine` may run beside its second GEMM; None where it may not."""
        if self._beside_gemm is None or not isinstance(dispatched, DeepepLlDispatchOutput):
            return None
        return self._beside_gemm.begin(dispatched.masked_m, dispatched.hidden_states)

    def combine(self, result: RowsCombineInput, overlap: DownGemmOverlap | None = None) -> torch.Tensor:
        """[T, H] of this rank's tokens, complete. `overlap`: what the experts ran with."""
        if result.format is DispatchFormat.DEEPEP_LL:
            if overlap is None or self._beside_gemm is None:
                return self._combine_low_latency(result)
            with self._beside_gemm.running(overlap) as options:
                return self._combine_low_latency(result, **options)
        handle = self.buffer.in_flight.take(result.topk_ids)
        out_TH, _, _ = self.buffer.raw.combine(result.hidden_states, handle)
        self.buffer.after_normal()
        return out_TH

    def abandon(self, dispatched: DeepepNormalDispatchOutput | DeepepLlDispatchOutput, dtype: torch.dtype) -> None:
        """Combine NaN in place of this rank's results, which also makes the number of low-latency calls even.

        If that fails too, all ranks clean the buffer before the next low-latency step.
        """
        ids = dispatched.topk_ids
        try:
            if isinstance(dispatched, DeepepLlDispatchOutput):
                shape = self.buffer.shape
                num_rows = shape.ep_size * self.buffer.settings.max_dispatch_tokens
                size = (shape.num_local_experts, num_rows, shape.hidden_size)
                rows = torch.full(size, NAN, dtype=dtype, device=ids.device)
            else:
                rows = torch.full_like(dispatched.hidden_states, NAN, dtype=dtype)
            self.combine(dispatched.result(rows, is_partial=False))
        finally:
            self.buffer.in_flight.discard(ids)

    def why_not_capturable(self, max_num_tokens: int) -> str | None:
        """Low latency within its token limit can be captured; normal mode cannot."""
        return why_not_capturable(self.buffer.settings, max_num_tokens)

    def prepare_replay(self) -> None:
        """Clean the buffer that all layers share, if it needs it."""
        self.buffer.prepare_low_latency()

    def _dispatch_normal(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> DeepepNormalDispatchOutput:
        self.buffer.in_flight.check_room()
        raw = self.buffer.raw
        per_rank, per_node, per_expert, is_in_rank, _ = raw.get_dispatch_layout(ids_TK, self.buffer.shape.num_experts)
        sent: Any = x_TH
        if self.dispatch_dtype.is_fp8:
            sent = quantize_token_groups(x_TH, ue8m0=self.dispatch_dtype is DispatchDtype.FP8_UE8M0)
        received, local_ids_RK, weights_RK, num_rows, handle, _ = raw.dispatch(
            sent,
            topk_idx=ids_TK,
            topk_weights=weights_TK,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            expert_alignment=self._expert_alignment,
        )
        self.buffer.after_normal()
        self.buffer.in_flight.add(local_ids_RK, handle)
        x_RH, scale_RG = received if isinstance(received, tuple) else (received, None)
        return DeepepNormalDispatchOutput(x_RH, scale_RG, local_ids_RK, weights_RK, num_rows)

    def _dispatch_low_latency(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> DeepepLlDispatchOutput:
        buffer, limit, num_tokens = self.buffer, self.buffer.settings.max_dispatch_tokens, x_TH.shape[0]
        if num_tokens > limit:
            raise TransportStateError(
                f"a low-latency step has {num_tokens} tokens, but --deepep-max-dispatch-tokens is {limit}"
            )
        buffer.in_flight.check_room()
        buffer.prepare_low_latency()
        hidden_size = x_TH.shape[1]
        received, masked_m, handle = buffer.low_latency_dispatch(
            pad_columns(x_TH, ll_hidden_size(hidden_size)).contiguous(), ids_TK, **self._low_latency_options
        )
        buffer.in_flight.add(ids_TK, handle)
        x_EMH, scale = received if isinstance(received, tuple) else (received, None)
        if self.dispatch_dtype is not DispatchDtype.NVFP4:  # the packed layout of NVFP4 has no column axis to cut
            x_EMH, scale = _cut_columns(x_EMH, scale, hidden_size)
        return DeepepLlDispatchOutput(
            x_EMH,
            scale,
            ids_TK,
            weights_TK,
            masked_m,
            expected_rows(num_tokens, buffer.shape),
            most_received_rows(buffer.settings, buffer.shape),
        )

    def _dtype_options(self) -> dict[str, Any]:
        """Keywords of low latency for the dispatch dtype. The scale options belong to FP8 only."""
        if self.dispatch_dtype is DispatchDtype.NVFP4:
            return {"use_fp8": False, "use_nvfp4": True, "x_global_scale": self._input_multiplier}
        if not self.dispatch_dtype.is_fp8:
            return {"use_fp8": False}
        packs = self.dispatch_dtype is DispatchDtype.FP8_UE8M0
        options = {"round_scale": packs, "use_ue8m0": packs}
        known = accepted(self.buffer.raw.low_latency_dispatch, **options)
        if packs and known != options:
            raise UnsupportedPathError(
                f"--moe-a2a-backend {self.buffer.transport}: the installed release cannot send power-of-two scales, "
                "which deep_gemm needs on SM100; use deepep or nixl"
            )
        return {"use_fp8": True, **known}

    def _combine_low_latency(self, result: RowsCombineInput, **options: Any) -> torch.Tensor:
        handle = self.buffer.in_flight.take(result.topk_ids)
        hidden_size = result.hidden_states.shape[-1]
        rows_EMH = _widen(result.hidden_states, ll_hidden_size(hidden_size))
        out_TH = self.buffer.low_latency_combine(rows_EMH, result.topk_ids, result.topk_weights, handle, **options)
        return out_TH[:, :hidden_size]


def is_capturing() -> bool:
    """True while a CUDA graph is captured on the current stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _widen(x_EMH: torch.Tensor, num_cols: int) -> torch.Tensor:
    """Contiguous rows of `num_cols` columns: the rows that `x` is a view of if they are that wide, else a padded copy.

    The added columns may hold anything, because they are cut off again after the combine.
    """
    num_experts, num_rows, _ = x_EMH.shape
    end = x_EMH.storage_offset() + num_experts * num_rows * num_cols
    if (
        x_EMH.stride() == (num_rows * num_cols, num_cols, 1)
        and end * x_EMH.itemsize <= x_EMH.untyped_storage().nbytes()
    ):
        return x_EMH.as_strided((num_experts, num_rows, num_cols), x_EMH.stride())
    return pad_columns(x_EMH, num_cols).contiguous()


def _cut_columns(
    x_EMH: torch.Tensor, scale: torch.Tensor | None, hidden_size: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Views without the columns that were padded for the transport."""
    if x_EMH.shape[-1] == hidden_size or scale is None:
        return x_EMH[..., :hidden_size], scale
    columns_per_scale = 128 if scale.dtype == torch.float32 else 512
    return x_EMH[..., :hidden_size], scale[..., : -(-hidden_size // columns_per_scale)]
