"""`emulate`, which stands beside the real library on a card, computes what the emulated library computes in CI."""

from typing import Any

import pytest
import torch

from tests.emulators.cutlass import emulate, install_cutlass
from tests.moe.backends import scenarios
from tests.tables import rows


@rows("path", "mxfp4-sm90", "cutlass-bf16", "cutlass-fp8_block")
def test_both_entrances_lead_to_the_same_numbers(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    emulator = install_cutlass(monkeypatch)
    from flashinfer import fused_moe

    calls: list[dict[str, Any]] = []
    genuine = fused_moe.cutlass_fused_moe
    monkeypatch.setattr(fused_moe, "cutlass_fused_moe", lambda **call: calls.append(call) or genuine(**call))
    scenarios.run_scenario(emulator, path)
    assert len(calls) == len(emulator.calls) > 1
    got = emulate(calls[-1])
    assert emulator.exact is not None
    assert torch.equal(got, emulator.exact)
