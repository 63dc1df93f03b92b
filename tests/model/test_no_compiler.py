"""A GPU on a machine without a C compiler: Triton cannot start its kernels, so torch does all of the model's work."""

import pytest
import torch

from model import fused
from model.attention import triton
from model.attention.base import choose_attention
from tests.model.attention_cases import GQA
from tests.tables import rows

CUDA = torch.device("cuda")


@rows("lack, chosen", ("a C compiler", "torch"), (None, "triton"))
def test_attention_and_fused_kernels_need_what_triton_needs(
    monkeypatch: pytest.MonkeyPatch, lack: str | None, chosen: str
) -> None:
    for module in (fused, triton):
        monkeypatch.setattr(module, "missing_for_triton", lambda: lack)
    monkeypatch.setattr(fused, "_module", fused._module.__wrapped__)
    assert choose_attention([GQA], CUDA) == chosen
    assert (fused.fused_kernels(CUDA) is None) is (lack is not None)
    if lack:
        assert triton.TritonAttention.lacks(CUDA) == lack
