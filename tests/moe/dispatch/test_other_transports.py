"""Mooncake, NIXL and FlashInfer's all-to-all on emulated ranks; mori is tested with aiter, its only backend."""

import functools
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe import MoeA2ABackend, MoeBackend, Topology
from moe.backend import DispatchContext
from moe.backends.torch.backend import TorchBackend, TorchRunnerCore, standard_to_torch
from moe.check.reference import reference_moe
from moe.config import DispatchDtype, DispatchFormat
from moe.dispatch.deepep_settings import DeepepMode
from moe.dispatch.flashinfer import FlashinferDispatcher, build_alltoall, group_communicator
from moe.dispatch.mooncake import MooncakeBuffer
from moe.dispatch.nixl import NixlBuffer
from moe.errors import MoeConfigError, TransportStateError, UnsupportedPathError
from moe.formats import activation_quant
from moe.registry import load_backend
from moe.routing import StandardTopK
from moe.types import FlashinferCombineInput, RunState, StandardDispatchOutput
from tests.emulators import alltoall
from tests.emulators.alltoall import install_alltoall
from tests.emulators.deep_gemm import install_deep_gemm
from tests.emulators.low_latency import install_low_latency
from tests.emulators.ranks import Rank, RankGroup, run_ranks, this_rank
from tests.emulators.refusal import KernelRefusal
from tests.moe.backends import hostile
from tests.moe.dispatch import several_ranks
from tests.moe.dispatch.several_ranks import PLAIN, E, I, K, deepep, only_rank, shape_of, worst_error
from tests.tables import rows

H, FLASHINFER_H = 2048, 256
BUFFERS = {MoeA2ABackend.MOONCAKE: MooncakeBuffer, MoeA2ABackend.NIXL: NixlBuffer}


@rows("a2a", *BUFFERS)
@rows(
    "backend, name, inter, num_tokens, dtype, rounding, tolerance",
    (MoeBackend.TORCH, "mxfp4", I, [4, 0, 3, 8], torch.float32, None, 1e-5),
    (MoeBackend.DEEP_GEMM, "fp8_block", 128, [4, 3], torch.bfloat16, activation_quant.fp8_groups, 1e-3),
)
def test_low_latency_libraries(
    monkeypatch: pytest.MonkeyPatch, a2a: MoeA2ABackend, backend: MoeBackend, name: str, inter: int,
    num_tokens: list[int], dtype: torch.dtype, rounding: Any, tolerance: float,
) -> None:  # fmt: skip
    install_low_latency(monkeypatch, wide=True)
    install_deep_gemm(monkeypatch, wide=True)
    monkeypatch.setattr("moe.backends.deep_gemm.backend.RESULT_DTYPE", torch.float32)
    experts = hostile.plain_experts(name, E, H, inter)
    inputs = several_ranks.rank_inputs(num_tokens, H, dtype)
    context = DispatchContext(
        dispatch_format=DispatchFormat.DEEPEP_LL, format_name=name, device=torch.device("cpu")
    )  # fmt: skip
    dispatch_dtype = load_backend(backend).dispatch_dtype(context)
    outputs = several_ranks.run_layer(
        experts, inputs, backend=backend, a2a=a2a, formats=a2a.dispatch_formats, dtype=dtype,
        dispatcher_for=lambda rank, config: deepep(rank, dispatch_dtype=dispatch_dtype, kind=BUFFERS[a2a]),
    )  # fmt: skip
    twin = functools.partial(reference_moe, experts=experts, activation=PLAIN, quantize_input=rounding)
    assert worst_error(outputs, inputs, twin) < tolerance


def test_what_these_libraries_lack_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in BUFFERS.values():
        with pytest.raises(UnsupportedPathError, match="has low-latency kernels only"):
            run_ranks(2, lambda rank, kind=kind: deepep(rank, DeepepMode.AUTO, kind=kind))
        with pytest.raises(UnsupportedPathError, match=r"needs the package (mooncake|nixl_ep)"):
            deepep(only_rank(), kind=kind)
    install_low_latency(monkeypatch)
    with pytest.raises(UnsupportedPathError, match=r"--moe-a2a-backend mooncake: .* cannot send power-of-two scales"):
        deepep(only_rank(), dispatch_dtype=DispatchDtype.FP8_UE8M0, kind=MooncakeBuffer)


# ---- FlashInfer ----


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    install_alltoall(monkeypatch)


def transport_of(rank: Rank, quantize: Any = None) -> FlashinferDispatcher:
    shape = shape_of(rank, FLASHINFER_H)
    return FlashinferDispatcher(build_alltoall(rank, shape, 8), rank.rank(), shape, 8, quantize)


@rows("num_tokens", [7], [5, 8], [3, 0, 8, 1], [1, 2, 0, 4, 5, 0, 7, 8])
def test_flashinfer_ranks_equal_one_rank(flashinfer: None, num_tokens: list[int]) -> None:
    """Dispatch, plain torch experts on the received slots, combine."""
    experts = hostile.plain_experts("mxfp4", E, FLASHINFER_H, I)
    inputs = several_ranks.rank_inputs(num_tokens, FLASHINFER_H, torch.float32)
    ep_size = len(num_tokens)

    def work(rank: Rank) -> torch.Tensor:
        transport = transport_of(rank)
        topology = Topology(ep_size=ep_size, ep_rank=rank.rank())
        config = several_ranks.layer_config(experts, torch.float32, place=topology)
        info = TorchBackend().prepare(hostile.shard(experts, ep=(ep_size, rank.rank())), config, topology)
        received = transport.dispatch(*inputs[rank.rank()])
        assert received.num_tokens is None
        assert received.hidden_states.shape == (8 * ep_size, FLASHINFER_H)
        standard = StandardDispatchOutput(received.hidden_states, received.topk_output)
        core_input = standard_to_torch(standard, info, config, RunState())
        return transport.combine(FlashinferCombineInput(TorchRunnerCore(config).run(core_input, info, RunState())))

    outputs = run_ranks(ep_size, work)
    assert worst_error(outputs, inputs, lambda x, topk: reference_moe(x, topk, experts, PLAIN)) < 1e-5


def test_flashinfer_slots_without_an_expert_travel_nowhere(flashinfer: None) -> None:
    nobody = StandardTopK(torch.ones(4, K), torch.full((4, K), -1, dtype=torch.int32))

    def work(rank: Rank) -> list[int]:
        ids = transport_of(rank).dispatch(hostile.tokens(4, FLASHINFER_H).float(), nobody).topk_output.ids
        return (ids >= 0).any(-1).nonzero().flatten().tolist()

    assert run_ranks(2, work) == [[0, 1, 2, 3], [8, 9, 10, 11]], "every rank keeps its own, with weight zero"


def test_flashinfer_sends_quantized_tokens_with_their_scales(flashinfer: None) -> None:
    def quantize(x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x_TH[:, ::2].contiguous(), x_TH[:, ::16].contiguous()

    def work(rank: Rank) -> Any:
        transport = transport_of(rank, quantize)
        received = transport.dispatch(hostile.tokens(4, FLASHINFER_H).float(), hostile.routing(4, E, K))
        transport.combine(received.result(torch.zeros(16, FLASHINFER_H), is_partial=False))
        return received

    received = run_ranks(2, work)[0]
    assert (received.hidden_states.shape, received.hidden_states_scale.shape) == ((16, 128), (16, 16))
    is_used = (received.topk_output.ids >= 0).all(-1)
    assert bool(received.hidden_states[is_used].isfinite().all())


def test_flashinfer_limits_and_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(only_rank(), 256)
    with pytest.raises(MoeConfigError, match="max_tokens is 0"):
        FlashinferDispatcher(None, 0, shape, 0)
    with pytest.raises(TransportStateError, match="9 tokens, but the transport holds 8"):
        FlashinferDispatcher(None, 0, shape, 8).dispatch(hostile.tokens(9, 256), hostile.routing(9, E, K))
    monkeypatch.setitem(sys.modules, "flashinfer.comm", None)
    with pytest.raises(UnsupportedPathError, match="--moe-a2a-backend flashinfer needs the package flashinfer"):
        build_alltoall(only_rank(), shape, 8)


def test_flashinfer_ranks_meet_over_the_experts_group(flashinfer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """G65: no MPI; the ranks of a node are counted by host; a group of another size is refused."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setattr("socket.gethostname", lambda: f"node{this_rank().rank() // 2}")
    built: list[Any] = []
    original = alltoall.MoeAlltoAll.__init__

    def init(self: Any, mapping: Any, *rest: Any, **options: Any) -> None:
        built.append((mapping.rank, mapping.gpus_per_node, options["mnnvl_config"].comm_backend.Get_rank()))
        original(self, mapping, *rest, **options)

    monkeypatch.setattr(alltoall.MoeAlltoAll, "__init__", init)
    shape = shape_of(Rank(RankGroup(4), 0), FLASHINFER_H)
    run_ranks(4, lambda rank: build_alltoall(rank, shape, 8))
    assert sorted(built) == [(0, 2, 0), (1, 2, 1), (2, 2, 2), (3, 2, 3)]
    with pytest.raises(MoeConfigError, match="--expert-parallel-size is 4, but the group has 2 ranks"):
        run_ranks(2, lambda rank: build_alltoall(rank, shape, 8))


def test_flashinfer_without_a_communicator_wants_mpi(flashinfer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """G65: what the library does to a caller who gives it no group, or splits one."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    import flashinfer.comm

    def build(rank: Rank, config: Any) -> Any:
        mapping = flashinfer.comm.Mapping(world_size=1, rank=0, tp_size=1, moe_ep_size=1)
        return alltoall.MoeAlltoAll(mapping, 8, K, E, hidden_size=256, mnnvl_config=config)

    with pytest.raises(ImportError, match="mpi4py"):
        run_ranks(1, lambda rank: build(rank, None))
    with pytest.raises(KernelRefusal, match="ranks of the world"):
        run_ranks(1, lambda rank: build(rank, SimpleNamespace(comm_backend=alltoall.TorchDistBackend(rank))))


def test_flashinfers_own_memory_takes_the_communicator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """G65, with the library's classes and a real process group: its memory keeps the group that it was given."""
    alltoall.import_flashinfer()
    from flashinfer.comm import Mapping, mnnvl

    monkeypatch.setattr(mnnvl.MnnvlMemory, "comm", None)
    monkeypatch.setattr(mnnvl.MnnvlMemory, "config", None)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        ranks = group_communicator(mnnvl, torch.distributed.group.WORLD)
        mapping = Mapping(world_size=1, rank=0, gpus_per_node=1, tp_size=1, moe_ep_size=1)
        mnnvl.MnnvlMemory.set_comm_from_config(mapping, mnnvl.MnnvlConfig(comm_backend=ranks))
        assert mnnvl.MnnvlMemory.get_comm(mapping) is ranks
        assert (ranks.allgather("here"), ranks.bcast("first", 0), ranks.Get_size()) == (("here",), "first", 1)
    finally:
        torch.distributed.destroy_process_group()


def test_emulated_signatures_are_the_librarys() -> None:
    alltoall.import_flashinfer()
    import flashinfer.comm

    for name in ("__init__", "dispatch"):
        ours, real = (
            [(p.name, p.kind, p.default) for p in inspect.signature(getattr(kind, name)).parameters.values()]
            for kind in (alltoall.MoeAlltoAll, flashinfer.comm.MoeAlltoAll)
        )
        assert ours == real
