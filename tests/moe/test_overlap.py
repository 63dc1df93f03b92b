"""A combine beside the experts' second GEMM: right order, equal bits, and refusals by name; libraries are emulated."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe import MoeA2ABackend, MoeBackend, MoeRunner, Topology
from moe.config import DispatchDtype, DispatchFormat
from moe.dispatch import transport
from moe.dispatch.beside_gemm import CombineBesideGemm
from moe.dispatch.deepep_settings import DeepepMode, DeepepSettings
from moe.dispatch.transport import DispatchSpec, build_transport
from moe.errors import UnsupportedPathError
from moe.overlap import DownGemmOverlap, SideStream, SignalKind, takes
from moe.registry import load_backend
from moe.routing import StandardTopK
from tests.emulators import deepep
from tests.emulators.cutedsl import install_cutedsl
from tests.emulators.deep_gemm import install_deep_gemm
from tests.emulators.deepep import install_deepep
from tests.emulators.ranks import Rank, run_ranks
from tests.emulators.signals import (
    ExpertSignalBuffer,
    SignallingDeepGemm,
    TileSignalBuffer,
    install_signal_buffer,
    signal_from,
)
from tests.moe.backends import hostile

CUTEDSL, DEEP_GEMM = MoeBackend.FLASHINFER_CUTEDSL, MoeBackend.DEEP_GEMM
E, H, I, K, T, LIMIT = 2, 2048, 128, 2, 5, 64


class Spy:
    """Stands for the side stream; writes to the rank's log what is recorded, waited for and joined."""

    def __init__(self, log: Any) -> None:
        self._log = log

    def event(self) -> Any:
        return SimpleNamespace(record=lambda: self._log.append("start event"))

    @contextmanager
    def after(self, event: Any) -> Iterator[None]:
        self._log.append("side stream waits for the start event")
        yield
        self._log.append("side stream is left")

    def join(self) -> None:
        self._log.append("main stream waits for the side stream")


class RankLog(threading.local):
    """A list for each thread."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def append(self, line: str) -> None:
        self.lines.append(line)


EXPECTED = [
    "GEMM", "start event", "down GEMM with signals", "side stream waits for the start event",
    "combine beside the GEMM", "side stream is left", "main stream waits for the side stream",
]  # fmt: skip


def check(backend: MoeBackend, format_name: str, kind: SignalKind, log: RankLog) -> None:
    """On each rank the sums with overlap are those without, and everything happens in the right order."""
    x = hostile.tokens(2 * T, H, size=1.0).bfloat16()
    experts = hostile.quantized_experts(format_name, E, H, I, x=x)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(2 * T)]).int()
    topk = StandardTopK(torch.rand(2 * T, K), ids)

    def work(rank: Rank) -> None:
        topology = Topology(ep_size=2, ep_rank=rank.rank(), a2a=MoeA2ABackend.DEEPEP)
        own = hostile.with_layer_scales(hostile.shard(experts, ep=(2, rank.rank())), experts)
        config = hostile.make_config(E, H, I, K, place=topology, max_num_tokens=LIMIT)
        info = load_backend(backend).prepare(own, config, topology)
        runner = MoeRunner(backend, MoeA2ABackend.DEEPEP, config, dispatch_formats=(DispatchFormat.DEEPEP_LL,))
        dtype = DispatchDtype.BF16 if backend is CUTEDSL else DispatchDtype.FP8
        built = build_transport(
            topology, config, group=rank, dispatch_dtypes={dtype}, row_multiple=128,  # type: ignore[arg-type]
            settings=DeepepSettings(mode=DeepepMode.LOW_LATENCY, max_dispatch_tokens=LIMIT),
        )  # fmt: skip
        cut = slice(rank.rank() * T, rank.rank() * T + T)
        own_inputs = x[cut], StandardTopK(topk.weights[cut], topk.ids[cut])
        plain: Any = built.dispatcher(DispatchSpec(dispatch_dtype=dtype))
        sums = plain.combine(runner.run(plain.dispatch(*own_inputs), info))
        assert sums.abs().max() > 0
        beside: Any = built.dispatcher(DispatchSpec(dispatch_dtype=dtype, signals=kind))
        dispatched = beside.dispatch(*own_inputs)
        log.lines.clear()
        overlap = beside.begin_overlap(dispatched)
        runner.set_overlap_args(overlap)
        result = runner.run(dispatched, info)
        assert torch.equal(beside.combine(result, overlap), sums)
        assert log.lines == EXPECTED

    run_ranks(2, work)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> RankLog:
    log = RankLog()
    monkeypatch.setattr(transport, "SideStream", lambda device: Spy(log))
    monkeypatch.setattr("moe.dispatch.deepep.is_capturing", deepep.is_capturing)
    return log


def test_deep_gemm_signals_tiles(monkeypatch: pytest.MonkeyPatch, log: Any) -> None:
    library = SignallingDeepGemm(log)
    library.install(monkeypatch)
    install_signal_buffer(monkeypatch, TileSignalBuffer, log)
    check(DEEP_GEMM, "fp8_block", SignalKind.TILES, log)
    assert set(library.num_sms_by_rank.values()) == {132}, "the processors are given back"


def test_cutedsl_signals_experts(monkeypatch: pytest.MonkeyPatch, log: Any) -> None:
    signal_from(install_cutedsl(monkeypatch), monkeypatch, log)
    install_signal_buffer(monkeypatch, ExpertSignalBuffer, log)
    check(CUTEDSL, "nvfp4", SignalKind.EXPERTS, log)


def test_libraries_without_signals_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    install_deep_gemm(monkeypatch)
    config = hostile.make_config(E, H, I, K)
    info = load_backend(DEEP_GEMM).prepare(hostile.plain_experts("fp8_block", E, H, I), config, Topology())
    with pytest.raises(UnsupportedPathError, match="no arguments enable_overlap and signal: install a release"):
        load_backend(DEEP_GEMM).check_signals(info)
    side = SideStream(torch.device("cpu"))
    buffer = install_deepep(monkeypatch)
    for kind, name in ((SignalKind.EXPERTS, "src_signals"), (SignalKind.TILES, "comp_signal")):
        with pytest.raises(UnsupportedPathError, match=f"deep_ep lacks the arguments .*{name}.* leave it off"):
            CombineBesideGemm(buffer.low_latency_combine, kind, H, side, 132)
    with pytest.raises(UnsupportedPathError, match="hidden size 2880 has to be padded"):
        CombineBesideGemm(ExpertSignalBuffer.low_latency_combine, SignalKind.EXPERTS, 2880, side, 132)


def test_arguments_of_compiled_functions_are_in_their_text() -> None:
    assert takes(lambda signal, enable_overlap: None, "signal", "enable_overlap")
    assert not takes(lambda signal: None, "signal", "enable_overlap")

    class Compiled:
        """masked(a: tuple, signal: Optional[Tensor] = None)"""

        @property
        def __signature__(self) -> Any:
            raise ValueError("no signature")

        def __call__(self) -> None: ...

    assert takes(Compiled(), "signal")
    assert not takes(Compiled(), "signal", "enable_overlap")


def test_without_a_gpu_everything_runs_in_order() -> None:
    side = SideStream(torch.device("cpu"))
    assert not side.is_real
    assert side.event() is None
    with side.after(None):
        overlap = DownGemmOverlap(100, torch.zeros(2))
    overlap.start()
    side.join()
