"""DeepGEMM through the runner: alone and behind DeepEP in both modes, against the twin with quantized activations."""

import sys
from types import SimpleNamespace

import pytest
import torch

from moe import MoeRunner, Topology
from moe.backends.deep_gemm import permutes as deep_gemm_permutes
from moe.check.selfcheck import check_layer
from moe.dispatch.deepep_settings import DeepepMode
from moe.errors import UnsupportedPathError
from moe.formats import activation_quant, token_groups
from moe.layouts.deep_gemm import m_major
from moe.layouts.expert_slots import permute_rows, token_of_row, unpermute_sum
from moe.types import DeepepNormalDispatchOutput, RunState
from tests.emulators import deep_gemm as emulated
from tests.emulators.deep_gemm import install_deep_gemm
from tests.emulators.deepep import install_deepep
from tests.moe.backends import contract, hostile
from tests.moe.backends.contract import DEEP_GEMM, NONE, E, K, Path
from tests.moe.backends.deep_gemm_cases import BACKEND, QUANTIZED, H, run_deepep
from tests.tables import rows

PATHS = tuple(path for path in contract.PATHS if path.backend is DEEP_GEMM)


def run_alone(num_tokens: int, path: Path = PATHS[0]) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's answer, and the twin's."""
    experts, x, topk = (
        contract.make_experts(path, 1),
        contract.tokens(path, num_tokens),
        hostile.routing(num_tokens, E, K),
    )
    result = contract.prepare(path, experts, Topology())(x, topk)
    return result.hidden_states, contract.expected(path, x, topk, experts)


@rows("path", *PATHS)
@rows("num_tokens, kernel", (256, "masked"), (257, "contiguous"))
def test_up_to_256_tokens_take_the_masked_kernel(
    monkeypatch: pytest.MonkeyPatch, path: Path, num_tokens: int, kernel: str
) -> None:
    emulator = contract.install(monkeypatch, DEEP_GEMM, path.arch)
    run_alone(num_tokens, path)
    assert set(emulator.calls) == {kernel}


@rows("arch", "sm90", "sm100")
@rows(
    "mode, num_tokens, kernel",
    (DeepepMode.NORMAL, [1, 2, 0, 4, 5, 0, 7, 8], "contiguous"),
    (DeepepMode.LOW_LATENCY, [3, 0, 8, 1], "masked"),
)
def test_behind_deepep_ranks_equal_one_rank(
    monkeypatch: pytest.MonkeyPatch, arch: str, mode: DeepepMode, num_tokens: list[int], kernel: str
) -> None:
    emulator = contract.install(monkeypatch, DEEP_GEMM, arch)
    install_deepep(monkeypatch, wide=True)
    assert run_deepep(mode, arch, num_tokens) < QUANTIZED
    assert set(emulator.calls) == {kernel}


@rows("path", *PATHS)
def test_bf16_results_pass_the_self_check(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """The real kernels write bf16; on SM100 the twin sees power-of-two scales too."""
    install_deep_gemm(monkeypatch, path.arch)
    experts = contract.make_experts(path, 1)
    config = contract.config_of(path, experts, Topology())
    info, runner = BACKEND.prepare(experts, config, Topology()), MoeRunner(DEEP_GEMM, NONE, config)
    report = check_layer(runner, info, experts, layer=0, topology=Topology())
    assert 0 < report.worst_error < BACKEND.formats["fp8_block"].tolerance
    got, want = run_alone(100, path)
    assert got.dtype == torch.bfloat16
    assert hostile.relative_error(got, want) < 2e-2


# ---- layouts ----


def test_scales_are_m_major_with_a_pitch_of_four() -> None:
    scale = torch.rand(3, 5, 7)
    view = m_major(scale)
    assert torch.equal(view, scale)
    assert view.stride() == (56, 1, 8)
    assert m_major(view).data_ptr() == view.data_ptr(), "no copy where the layout is right"
    assert m_major(torch.rand(5, 7)).stride() == (1, 8)
    sliced = view[..., :4]
    assert m_major(sliced).stride() == (32, 1, 8), "the library refuses a gap between experts"
    assert torch.equal(m_major(sliced), scale[..., :4])


def test_powers_of_two_and_packing() -> None:
    values = torch.tensor([1.0, 1.5, 2.0, 0.75, 2.0**-20, 3e-5])
    assert token_groups.round_up_to_power_of_two(values).tolist() == [1.0, 2.0, 2.0, 1.0, 2.0**-20, 2.0**-15]
    scales = torch.tensor([[1.0, 2.0, 4.0, 0.5, 8.0]])
    packed = token_groups.pack_ue8m0(scales)
    assert packed.tolist() == [[127 | 128 << 8 | 129 << 16 | 126 << 24, 130]]
    assert torch.equal(token_groups.unpack_ue8m0(packed, 5), scales)


def test_token_groups_golden_values() -> None:
    x = torch.zeros(1, 256)
    x[0, :4] = torch.tensor([-1.0, 0.001, 0.3, 3.5])
    codes, scales = token_groups.quantize_token_groups(x)
    assert scales[0, 0].item() == 0.0078125
    assert codes.view(torch.uint8)[0, :4].tolist() == [0xF0, 0x20, 0x62, 0x7E]
    assert torch.equal(token_groups.dequantize_token_groups(codes, scales), activation_quant.fp8_groups(x, None))


def test_slots_go_to_rows_and_back() -> None:
    ids = torch.tensor([[2, -1], [0, 2], [-1, -1], [2, 0]])
    row = permute_rows(ids, torch.tensor([0, 4, 8]))
    assert row.tolist() == [[8, -1], [0, 9], [-1, -1], [10, 1]]
    assert token_of_row(row, 12).tolist() == [1, 3, 0, 0, 0, 0, 0, 0, 0, 1, 3, 0]
    rows = torch.arange(12.0)[:, None].clone()
    rows[2:8] = float("nan")
    weights = torch.ones(4, 2)
    assert unpermute_sum(rows, row, weights).flatten().tolist() == [8.0, 9.0, 0.0, 11.0]
    rows[0] = float("nan")
    assert unpermute_sum(rows, torch.full((4, 2), -1), weights).flatten().tolist() == [0.0] * 4, "exactly zero"


@rows("names", emulated.NAMES_NOW, emulated.NAMES_BEFORE, emulated.NAMES_FIRST)
def test_kernel_names_of_every_release(monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]) -> None:
    emulator = install_deep_gemm(monkeypatch, names=names)
    run_alone(5)
    assert emulator.calls == ["masked", "masked"]


# ---- refusals ----


def test_an_unknown_release(monkeypatch: pytest.MonkeyPatch) -> None:
    install_deep_gemm(monkeypatch)
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace())
    with pytest.raises(UnsupportedPathError, match="has none of m_grouped_fp8_gemm_nt_masked"):
        run_alone(1)


def test_payloads_that_the_kernel_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    install_deep_gemm(monkeypatch)
    with pytest.raises(UnsupportedPathError, match="takes tokens in FP8"):
        deep_gemm_permutes._need_scale(None)
    ragged = DeepepNormalDispatchOutput(
        torch.zeros(3, H), torch.ones(3, 1), torch.zeros(3, K, dtype=torch.int64), torch.ones(3, K), [3] * E
    )
    with pytest.raises(UnsupportedPathError, match="needs a dispatch with expert_alignment 128, got counts"):
        deep_gemm_permutes.deepep_normal_to_deep_gemm(ragged, None, None, RunState())  # type: ignore[arg-type]
    install_deepep(monkeypatch, wide=True)
    with pytest.raises(UnsupportedPathError, match="wants fp32 scales"):  # packed ones sent to an SM90
        run_deepep(DeepepMode.LOW_LATENCY, "sm100", [3, 4])
