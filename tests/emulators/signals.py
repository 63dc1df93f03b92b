"""Builds of `deep_ep` and `deep_gemm` whose down GEMM signals rows to a combine beside it, and CuTe-DSL's signals.

Punished as on a card: signals that are not zero before the GEMM, a combine whose signals never come (it would wait for
ever), arguments of the other build, and a GEMM that takes the processors of the combine. `log` has the calls in order.
"""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.emulators.cutedsl import CutedslEmulator
from tests.emulators.deep_gemm import DeepGemm
from tests.emulators.deepep import Buffer
from tests.emulators.refusal import need

NUM_SMS = 132
TILE, COLUMNS = 64, 128  # rows and columns that one tile of DeepGEMM writes


class SignalBuffer(Buffer):
    """What both builds share."""

    log: list[str]

    def _combine(self, *arguments: Any, hook: bool, overlap: bool, is_signalled: bool) -> Any:
        need(overlap == is_signalled, "overlap and signals come together")
        self.log.append("combine beside the GEMM" if overlap else "combine")
        return Buffer.low_latency_combine(self, *arguments, return_recv_hook=hook)


class ExpertSignalBuffer(SignalBuffer):
    """The build for the signals of CuTe-DSL."""

    def low_latency_combine(  # type: ignore[override]
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: Any,
        return_recv_hook: bool = False, overlap: bool = False, src_signals: torch.Tensor | None = None,
        src_signal_expect_value: int = 0,
    ) -> Any:  # fmt: skip
        if src_signals is not None:
            need(src_signals.dtype == torch.uint32 and src_signals.shape == (x.shape[0],), "uint32 signals [E]")
            need(src_signals.tolist() == [src_signal_expect_value] * x.shape[0], "signals that never come")
        is_signalled, arguments = src_signals is not None, (x, topk_idx, topk_weights, handle)
        return self._combine(*arguments, hook=return_recv_hook, overlap=overlap, is_signalled=is_signalled)


class TileSignalBuffer(SignalBuffer):
    """The build for the signals of DeepGEMM."""

    def low_latency_combine(  # type: ignore[override]
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: Any,
        overlap: bool = False, packed_recv_count: torch.Tensor | None = None, comp_signal: torch.Tensor | None = None,
        block_m: int = 64, threshold: int = 0, num_sms: int = 3, return_recv_hook: bool = False,
    ) -> Any:  # fmt: skip
        if comp_signal is not None:
            need(packed_recv_count is not None and packed_recv_count.dtype == torch.int32, "rows of each expert")
            need(comp_signal.dtype == torch.int32 and num_sms > 0 and threshold > 0, "int32 signals")
            signals = comp_signal.view(x.shape[0], -1)
            need(signals.shape[1] >= -(-x.shape[1] // block_m), "a signal for each tile of rows")
            for expert, count in enumerate(packed_recv_count.tolist()):
                arrived = signals[expert, : -(-count // block_m)]
                need(bool((arrived == threshold).all()), "signals that never come")
        is_signalled, arguments = comp_signal is not None, (x, topk_idx, topk_weights, handle)
        return self._combine(*arguments, hook=return_recv_hook, overlap=overlap, is_signalled=is_signalled)


class SignallingDeepGemm(DeepGemm):
    """The release whose masked GEMM signals, on the processors that `set_num_sms` leaves it."""

    def __init__(self, log: list[str]) -> None:
        super().__init__("sm90", wide=False)
        self.log = log
        self.num_sms_by_rank: dict[int, int] = {}  # by thread: ranks are threads here, and in truth processes

    @property
    def num_sms(self) -> int:
        """Processors that the rank's GEMMs may use."""
        return self.num_sms_by_rank.get(threading.get_ident(), NUM_SMS)

    def masked(  # type: ignore[override]
        self, a: Any, b: Any, d: torch.Tensor, masked_m: torch.Tensor, expected_m: int, enable_overlap: bool = False,
        signal: torch.Tensor | None = None,
    ) -> tuple[int, int] | None:  # fmt: skip
        super().masked(a, b, d, masked_m, expected_m)
        need(enable_overlap == (signal is not None), "overlap and signals come together")
        self.log.append("down GEMM with signals" if enable_overlap else "GEMM")
        if signal is None:
            return None
        need(self.num_sms < NUM_SMS, "no processor is left to the combine")
        need(not signal.any(), "signals start at zero")
        tiles = signal.view(d.shape[0], -1)
        for expert, count in enumerate(masked_m.tolist()):
            tiles[expert, : -(-count // TILE)] += d.shape[2] // COLUMNS
        return TILE, d.shape[2] // COLUMNS

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def set_num_sms(num_sms: int) -> None:
            self.num_sms_by_rank[threading.get_ident()] = num_sms

        module = SimpleNamespace(
            m_grouped_fp8_gemm_nt_masked=self.masked, m_grouped_fp8_gemm_nt_contiguous=self.contiguous,
            get_num_sms=lambda: self.num_sms, set_num_sms=set_num_sms,
        )  # fmt: skip
        monkeypatch.setitem(sys.modules, "deep_gemm", module)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def signal_from(emulator: CutedslEmulator, monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    """Let the masked GEMM count its processors at each expert."""
    plain, alone = emulator._masked_gemm, threading.Lock()  # ranks are threads, and the emulator keeps its last result

    def signalling(problem: SimpleNamespace, call: SimpleNamespace) -> torch.Tensor:
        with alone:
            out, signals = plain(problem, call), call.dst_signals_tensor_gpu
        log.append("GEMM" if signals is None else "down GEMM with signals")
        if signals is not None:
            need(problem.sm_count < NUM_SMS, "no processor is left to the combine")
            need(not any(signals.tolist()), "signals start at zero")
            signals.copy_(torch.full(signals.shape, problem.sm_count, dtype=signals.dtype))
        return out

    monkeypatch.setattr(emulator, "_masked_gemm", signalling)


def install_signal_buffer(monkeypatch: pytest.MonkeyPatch, kind: type[SignalBuffer], log: list[str]) -> None:
    """`import deep_ep` finds this build until the test ends."""
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=type("Buffer", (kind,), {"log": log})))
