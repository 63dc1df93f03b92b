"""From settings to a transport: checks without a library, and every kind built and used."""

from typing import Any

import pytest
import torch

from moe import MoeA2ABackend, MoeBackend
from moe.config import DispatchFormat
from moe.dispatch.build import Transport, TransportSettings
from moe.dispatch.deepep_settings import DeepepMode, DeepepSettings, EpShape
from moe.dispatch.mori import MoriSettings
from moe.dispatch.payload import Payload
from moe.errors import MoeConfigError, UnsupportedPathError
from tests.emulators.alltoall import install_alltoall
from tests.emulators.deepep import install_deepep
from tests.emulators.low_latency import install_low_latency
from tests.emulators.mori import install_mori
from tests.emulators.ranks import Rank, run_ranks
from tests.moe.backends import hostile
from tests.moe.dispatch.several_ranks import E, K

H = 2048
LOW = DeepepSettings(mode=DeepepMode.LOW_LATENCY, max_dispatch_tokens=8)


def settings(a2a: MoeA2ABackend, **changes: Any) -> TransportSettings:
    fields: dict[str, Any] = {
        "a2a": a2a, "backend": MoeBackend.AITER, "format_name": "bf16", "max_num_tokens": 8, "deepep": LOW,
        "shape": EpShape(hidden_size=H, num_experts=E, top_k=K, ep_size=2),
        "mori": MoriSettings(max_dispatch_tokens=8),
    }  # fmt: skip
    return TransportSettings(**(fields | changes))


@pytest.mark.parametrize("a2a", [a2a for a2a in MoeA2ABackend if a2a is not MoeA2ABackend.NONE])
def test_every_transport_is_built_once_and_gives_dispatchers(
    monkeypatch: pytest.MonkeyPatch, a2a: MoeA2ABackend
) -> None:
    for install in (install_deepep, install_low_latency, install_mori, install_alltoall):
        install(monkeypatch)
    chosen = settings(a2a)

    def work(rank: Rank) -> Any:
        transport = Transport(chosen, rank)
        x, topk = hostile.tokens(4, H, seed=rank.rank()), hostile.routing(4, E, K)
        made = []
        for _ in range(2):  # two layers, one after the other
            dispatcher = transport.dispatcher()
            dispatched = dispatcher.dispatch(x, topk)
            made.append(dispatched)
            out = dispatcher.combine(dispatched.empty_result(torch.bfloat16))
            assert out.shape == (4, H)
        return made

    for rank_outputs in run_ranks(2, work):
        assert {dispatched.format for dispatched in rank_outputs} <= set(chosen.dispatch_formats)


def test_formats_follow_the_modes() -> None:
    for mode, formats in (
        (DeepepMode.AUTO, (DispatchFormat.DEEPEP_NORMAL, DispatchFormat.DEEPEP_LL)),
        (DeepepMode.NORMAL, (DispatchFormat.DEEPEP_NORMAL,)),
        (DeepepMode.LOW_LATENCY, (DispatchFormat.DEEPEP_LL,)),
    ):
        assert settings(MoeA2ABackend.DEEPEP, deepep=DeepepSettings(mode=mode)).dispatch_formats == formats
    assert settings(MoeA2ABackend.MORI).dispatch_formats == (DispatchFormat.MORI_NORMAL,)
    low = settings(MoeA2ABackend.MORI, mori=MoriSettings(low_latency=True))
    assert low.dispatch_formats == (DispatchFormat.MORI_LL,)
    assert settings(MoeA2ABackend.NIXL).dispatch_formats == (DispatchFormat.DEEPEP_LL,)


def test_deep_gemm_gets_its_payload() -> None:
    chosen = settings(MoeA2ABackend.DEEPEP, backend=MoeBackend.DEEP_GEMM, format_name="fp8_block", ue8m0_scales=True)
    assert chosen.payload(can_send_nvfp4=False) is Payload.FP8_UE8M0


def test_limits_are_checked_before_anything_is_built() -> None:
    with pytest.raises(MoeConfigError, match=r"--deepep-max-dispatch-tokens is 8, but a step may have 9 tokens"):
        Transport(settings(MoeA2ABackend.DEEPEP, max_num_tokens=9), None)
    with pytest.raises(MoeConfigError, match=r"max_dispatch_tokens is 8, but a step may have 9 tokens"):
        settings(MoeA2ABackend.MORI, max_num_tokens=9).check()
    odd = EpShape(hidden_size=9000, num_experts=E, top_k=K, ep_size=2)
    with pytest.raises(UnsupportedPathError, match="hidden size 9000"):
        settings(MoeA2ABackend.DEEPEP, shape=odd).check()
    with pytest.raises(MoeConfigError, match=r"moe\.dispatch\.standard"):
        settings(MoeA2ABackend.NONE)
