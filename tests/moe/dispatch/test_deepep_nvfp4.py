"""NVFP4 experts (CuTe-DSL v1) behind DeepEP low latency on emulated ranks: tokens sent as bf16 and as NVFP4."""

import threading
from typing import Any

import pytest
import torch

from moe import Activation, MoeA2ABackend, MoeBackend, MoeRunner, Topology
from moe.backend import DispatchContext
from moe.backends.flashinfer.cutedsl import FlashinferCutedslBackend
from moe.config import DispatchDtype, DispatchFormat
from moe.dispatch.deepep import DeepepBuffer, DeepepDispatcher
from moe.dispatch.deepep_settings import DeepepMode, DeepepSettings
from moe.errors import MoeConfigError, UnsupportedPathError
from tests.emulators.cutedsl import install_cutedsl
from tests.emulators.deepep import install_deepep
from tests.emulators.ranks import Rank, run_ranks
from tests.moe.backends import hostile
from tests.moe.dispatch.several_ranks import E, K, only_rank, rank_inputs, shape_of

H, I, LIMIT = 2048, 192, 64
ONE = torch.ones(1)
BACKEND = FlashinferCutedslBackend()
ONE_AT_A_TIME = threading.Lock()  # the ranks share one emulated kernel, which keeps its last result
CUTEDSL, DEEPEP = MoeBackend.FLASHINFER_CUTEDSL, MoeA2ABackend.DEEPEP


def buffer_for(rank: Rank, hidden: int = H, mode: DeepepMode = DeepepMode.LOW_LATENCY) -> DeepepBuffer:
    settings = DeepepSettings(mode=mode, max_dispatch_tokens=LIMIT)
    return DeepepBuffer(rank, settings, shape_of(rank, hidden), sends_fp8=False)


def outputs_of(dispatch_dtype: DispatchDtype, num_tokens: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(outputs, references) of every rank."""
    inputs = rank_inputs(num_tokens, H, torch.bfloat16)
    experts = hostile.quantized_experts("nvfp4", E, H, I, x=torch.cat([x for x, _ in inputs]))
    ep_size = len(num_tokens)

    def work(rank: Rank) -> torch.Tensor:
        index = rank.rank()
        part = hostile.with_layer_scales(hostile.shard(experts, ep=(ep_size, index)), experts)
        topology = Topology(ep_size=ep_size, ep_rank=index, a2a=DEEPEP, dispatch_dtype=dispatch_dtype)
        config = hostile.make_config(E, H, I, K, place=topology)
        info = BACKEND.prepare(part, config, topology)
        runner = MoeRunner(CUTEDSL, DEEPEP, config, dispatch_formats=(DispatchFormat.DEEPEP_LL,))
        buffer = buffer_for(rank)
        context = DispatchContext(
            dispatch_format=DispatchFormat.DEEPEP_LL, format_name="nvfp4", device=topology.device,
            knows_input_scale=True, can_send_nvfp4=buffer.can_send_nvfp4,
        )  # fmt: skip
        assert BACKEND.dispatch_dtype(context) is dispatch_dtype
        multiplier = info.input_quant.flatten()[:1] if dispatch_dtype is DispatchDtype.NVFP4 else None
        dispatcher = DeepepDispatcher(buffer, dispatch_dtype, input_multiplier=multiplier)
        dispatched = dispatcher.dispatch(*inputs[index])
        with ONE_AT_A_TIME:
            result = runner.run(dispatched, info)
        return dispatcher.combine(result)

    wide = hostile.layer_wide(experts, w2=False)
    return run_ranks(ep_size, work), [hostile.reference(x, topk, wide, Activation()) for x, topk in inputs]


def test_both_payloads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    install_cutedsl(monkeypatch)
    install_deepep(monkeypatch)
    as_bf16, wants = outputs_of(DispatchDtype.BF16, [5, 8])
    install_deepep(monkeypatch, nvfp4=True)
    as_nvfp4, _ = outputs_of(DispatchDtype.NVFP4, [5, 8])
    for first, second, want in zip(as_bf16, as_nvfp4, wants, strict=True):
        assert torch.equal(first, second)
        assert hostile.relative_error(first, want) < 5e-3, "expert outputs and sums are rounded to bf16"


def test_what_an_nvfp4_dispatch_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    install_deepep(monkeypatch, nvfp4=True)

    def make(rank: Rank, hidden: int = H, mode: DeepepMode = DeepepMode.LOW_LATENCY, scale: Any = ONE) -> object:
        return DeepepDispatcher(buffer_for(rank, hidden, mode), DispatchDtype.NVFP4, input_multiplier=scale)

    assert make(only_rank())
    with pytest.raises(MoeConfigError, match="static input scale"):
        make(only_rank(), scale=None)
    with pytest.raises(UnsupportedPathError, match="hidden size 2880: an NVFP4 dispatch cannot be padded"):
        make(only_rank(), 2880)
    with pytest.raises(UnsupportedPathError, match="--deepep-mode low_latency"):
        run_ranks(2, lambda rank: make(rank, mode=DeepepMode.AUTO))
