"""G69 on a card: `masked_swiglu` equals the torch reference, costs no memory of dead rows, and little time."""

import pytest
import torch

from moe import Activation
from moe.formats.token_groups import dequantize_token_groups, unpack_ue8m0
from moe.kernels.masked_swiglu import masked_swiglu
from moe.layouts.deep_gemm import swiglu_reference
from tests.gpu.common import DEEPSEEK_V4, DEVICE

pytestmark = pytest.mark.gpu
E, M, I = 32, 1024, 2048  # DeepSeek-V3 on 8 ranks of 128 tokens


def make(counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    counts_E = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    h = torch.randn(len(counts), M, 2 * I, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)) * 4
    is_dead = torch.arange(M, device=DEVICE) >= counts_E[:, None]
    return h.masked_fill(is_dead[..., None], float("nan")).bfloat16(), counts_E


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("counts", [[1] + [0] * (E - 1), [(37 * expert) % 200 for expert in range(E)], [M] * 4])
def test_live_rows_equal_the_reference(counts: list[int], ue8m0: bool) -> None:
    h, counts_E = make(counts)
    for activation in (Activation(), DEEPSEEK_V4):
        got = masked_swiglu(h, counts_E, activation, ue8m0=ue8m0)
        want = swiglu_reference(h, counts_E, activation, ue8m0=ue8m0)
        is_live = torch.arange(M, device=DEVICE) < counts_E[:, None]
        values = []
        for codes, scales in (got, want):
            fp32 = unpack_ue8m0(scales, I // 128) if ue8m0 else scales
            values.append(dequantize_token_groups(codes, fp32)[is_live])
        assert (got[1].shape, got[1].dtype, got[1].stride(-2)) == (want[1].shape, want[1].dtype, 1)
        assert float((values[0] - values[1]).norm() / values[1].norm()) < 2e-3


def test_one_live_token_needs_no_temporaries() -> None:
    """It allocates only the result, codes and scales of all slots; torch took half a gigabyte more."""
    h, counts_E = make([1] + [0] * (E - 1))
    masked_swiglu(h, counts_E, DEEPSEEK_V4, ue8m0=False)  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = masked_swiglu(h, counts_E, DEEPSEEK_V4, ue8m0=False)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= E * M * (I + I // 128 * 4) + (1 << 20)
    del result


def test_it_can_be_captured() -> None:
    h, counts_E = make([3] * E)
    masked_swiglu(h, counts_E, DEEPSEEK_V4, ue8m0=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codes, _ = masked_swiglu(h, counts_E, DEEPSEEK_V4, ue8m0=False)
    counts_E.fill_(2)
    graph.replay()
    want, _ = swiglu_reference(h, counts_E, DEEPSEEK_V4, ue8m0=False)
    same = codes[:, :2].view(torch.uint8) == want[:, :2].view(torch.uint8)
    assert float(same.float().mean()) > 0.99
