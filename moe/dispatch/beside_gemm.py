"""A low-latency combine that runs beside the experts' second GEMM and sends each row once that has signalled it.

Two builds of deep_ep can: one for the signals of FlashInfer's CuTe-DSL GEMM (`src_signals`), one for those of DeepGEMM
(`comp_signal`). Shape letters: E local experts, M rows per expert, H hidden.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moe.dispatch.deepep_settings import ll_hidden_size
from moe.errors import UnsupportedPathError
from moe.overlap import DownGemmOverlap, SideStream, SignalKind, takes

COMBINE_SMS = {SignalKind.EXPERTS: 32, SignalKind.TILES: 3}  # processors that the GEMM leaves to the combine
ARGUMENTS = {
    SignalKind.EXPERTS: ("overlap", "src_signals", "src_signal_expect_value"),
    SignalKind.TILES: ("overlap", "packed_recv_count", "comp_signal", "block_m", "threshold", "num_sms"),
}
_SMALLEST_TILE = 64  # rows of a tile of DeepGEMM


class CombineBesideGemm:
    """How one layer's combine overlaps; `begin` before the experts run, `running` around the combine."""

    def __init__(
        self, combine: Callable[..., object], kind: SignalKind, hidden_size: int, side: SideStream, num_sms: int
    ) -> None:
        """`combine` is the library's; `num_sms` are all processors of the device.

        Raises:
            UnsupportedPathError: this build of deep_ep, or this hidden size, cannot.
        """
        if not takes(combine, *ARGUMENTS[kind]):
            raise UnsupportedPathError(
                f"enable_single_batch_overlap is set, but low_latency_combine of the installed deep_ep lacks the "
                f"arguments {', '.join(ARGUMENTS[kind])}: install a build that has them, or leave it off"
            )
        if ll_hidden_size(hidden_size) != hidden_size:
            raise UnsupportedPathError(
                f"enable_single_batch_overlap is set, but hidden size {hidden_size} has to be padded for the combine, "
                "which would have to wait for all rows: leave it off"
            )
        self._kind, self._side = kind, side
        self._gemm_sms = num_sms - COMBINE_SMS[kind]
        self._counts_E: torch.Tensor | None = None

    def begin(self, masked_m: torch.Tensor, x_EMH: torch.Tensor) -> DownGemmOverlap:
        """Signals of zero, and the event before the GEMM. `masked_m` int32 [E] are the real rows."""
        self._counts_E = masked_m
        num_experts, device = masked_m.shape[0], masked_m.device
        if self._kind is SignalKind.EXPERTS:
            signals = torch.zeros(num_experts, dtype=torch.uint32, device=device)
        else:
            num_tiles = -(-x_EMH.shape[1] // _SMALLEST_TILE)
            signals = torch.zeros(num_experts * num_tiles, dtype=torch.int32, device=device)
        return DownGemmOverlap(self._gemm_sms, signals, self._side.event())

    @contextmanager
    def running(self, overlap: DownGemmOverlap) -> Iterator[dict[str, Any]]:
        """Arguments of the library's combine, which runs on the side stream from the start of the GEMM on."""
        options: dict[str, Any] = {"overlap": True}
        if self._kind is SignalKind.EXPERTS:
            options |= {"src_signals": overlap.signals, "src_signal_expect_value": overlap.num_sms}
        else:
            options |= {
                "packed_recv_count": self._counts_E, "comp_signal": overlap.signals, "block_m": overlap.block_m,
                "threshold": overlap.threshold, "num_sms": COMBINE_SMS[self._kind],
            }  # fmt: skip
        with self._side.after(overlap.start_event):
            yield options
        self._side.join()
