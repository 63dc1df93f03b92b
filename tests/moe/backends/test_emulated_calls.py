"""`emulate`, which stands beside the real library on a card, computes what the emulated library computes in CI."""

from typing import Any

import pytest
import torch

from tests.emulators.cutlass import emulate
from tests.moe.backends import contract
from tests.moe.backends.contract import CUTLASS, MXFP4, Path, path_of
from tests.tables import rows


@rows("path", path_of(MXFP4, arch="sm90"), path_of(CUTLASS), path_of(CUTLASS, format_name="fp8_block"))
def test_both_entrances_lead_to_the_same_numbers(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    emulator = contract.install(monkeypatch, path.backend, path.arch)
    from flashinfer import fused_moe

    calls: list[dict[str, Any]] = []
    genuine = fused_moe.cutlass_fused_moe
    monkeypatch.setattr(fused_moe, "cutlass_fused_moe", lambda **call: calls.append(call) or genuine(**call))
    contract.sum_of_ranks(path, emulator, contract.tokens(path), contract.TOPK, 2, 2)
    assert len(calls) == len(emulator.calls) == 4
    assert torch.equal(emulate(calls[-1]), emulator.exact)
