"""DeepGEMM through the runner: alone and behind DeepEP in both modes, against the twin with quantized activations."""

import sys
from types import SimpleNamespace

import pytest
import torch

from moe import (
    Activation,
    MoeA2ABackend,
    MoeBackend,
    MoeConfigError,
    MoeRunner,
    StandardDispatchOutput,
    Topology,
)
from moe.backends.deep_gemm import backend as deep_gemm
from moe.backends.deep_gemm import permutes as deep_gemm_permutes
from moe.check.selfcheck import check_layer
from moe.device import Device
from moe.dispatch.deepep_settings import DeepepMode
from moe.errors import UnsupportedPathError, WeightFormatError
from moe.formats import Bf16Weight, ExpertWeights, activation_quant
from moe.formats.token_groups import (
    dequantize_token_groups,
    pack_ue8m0,
    quantize_token_groups,
    round_up_to_power_of_two,
    unpack_ue8m0,
)
from moe.layouts import deep_gemm as deep_gemm_layout
from moe.layouts.expert_slots import masked_rows, permute_rows, token_of_row, unpermute_sum
from moe.types import DeepepNormalDispatchOutput, RunState
from tests.emulators import deep_gemm as emulated
from tests.emulators.deep_gemm import DeepGemm, install_deep_gemm
from tests.emulators.deepep import install_deepep
from tests.moe.backends import hostile
from tests.moe.backends.deep_gemm_cases import (
    BACKEND,
    DEEPSEEK_V4,
    QUANTIZED,
    E,
    H,
    I,
    K,
    experts_of,
    run_alone,
    run_deepep,
    twin,
)
from tests.moe.dispatch import several_ranks


@pytest.fixture(params=["sm90", "sm100"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[DeepGemm, str]:
    """fp32 results, so that nothing but the quantization rounds."""
    monkeypatch.setattr(deep_gemm, "RESULT_DTYPE", torch.float32)
    return install_deep_gemm(monkeypatch, request.param, wide=True), request.param


@pytest.mark.parametrize("num_tokens", [1, 3, 100, 256, 257, 300])
def test_alone_equals_the_twin(kernels: tuple[DeepGemm, str], num_tokens: int) -> None:
    emulator, arch = kernels
    got, topk, experts, x = run_alone(num_tokens)
    assert hostile.relative_error(got, twin(x, topk, experts, arch, DEEPSEEK_V4)) < QUANTIZED
    assert set(emulator.calls) == {"masked" if num_tokens <= 256 else "contiguous"}
    if num_tokens > 2:
        assert torch.equal(got[2], torch.zeros(H)), "all ids of this token are -1"


@pytest.mark.parametrize("ep_size", [2, 4, 8])
def test_expert_slices_sum_to_one_rank(kernels: tuple[DeepGemm, str], ep_size: int) -> None:
    parts = [run_alone(40, Topology(ep_size=ep_size, ep_rank=rank)) for rank in range(ep_size)]
    got = torch.stack([part[0] for part in parts]).sum(0)
    _, topk, experts, x = parts[0]
    assert hostile.relative_error(got, twin(x, topk, experts, kernels[1], DEEPSEEK_V4)) < QUANTIZED


@pytest.mark.parametrize("tp_size", [2, 4])
def test_tensor_slices_sum_to_one_rank(kernels: tuple[DeepGemm, str], tp_size: int) -> None:
    experts, x, topk = experts_of(H, 512), hostile.tokens(9, H), hostile.routing(9, E, K)
    total = torch.zeros(9, H)
    for rank in range(tp_size):
        topology = Topology(tp_size=tp_size, tp_rank=rank)
        local = hostile.shard(experts, tp=(tp_size, rank), block=128)
        config = several_ranks.layer_config(local, torch.bfloat16, place=topology)
        result = MoeRunner(MoeBackend.DEEP_GEMM, MoeA2ABackend.NONE, config).run(
            StandardDispatchOutput(x, topk), BACKEND.prepare(local, config, topology)
        )
        assert result.is_partial
        total += result.hidden_states
    assert hostile.relative_error(total, twin(x, topk, experts, kernels[1], Activation())) < QUANTIZED


@pytest.mark.parametrize("num_tokens", [[5, 8], [3, 0, 8, 1], [1, 2, 0, 4, 5, 0, 7, 8]])
@pytest.mark.parametrize("mode", [DeepepMode.NORMAL, DeepepMode.LOW_LATENCY])
def test_behind_deepep_ranks_equal_one_rank(
    kernels: tuple[DeepGemm, str], monkeypatch: pytest.MonkeyPatch, mode: DeepepMode, num_tokens: list[int]
) -> None:
    install_deepep(monkeypatch, wide=True)
    assert run_deepep(mode, kernels[1], num_tokens) < QUANTIZED
    assert set(kernels[0].calls) == {"masked" if mode is DeepepMode.LOW_LATENCY else "contiguous"}


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_bf16_results_pass_the_self_check(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """The real kernels write bf16; on SM100 the twin sees power-of-two scales too."""
    install_deep_gemm(monkeypatch, arch)
    experts = experts_of()
    config = several_ranks.layer_config(experts, torch.bfloat16, activation=DEEPSEEK_V4)
    info = BACKEND.prepare(experts, config, Topology())
    runner = MoeRunner(MoeBackend.DEEP_GEMM, MoeA2ABackend.NONE, config)
    report = check_layer(runner, info, experts, layer=0, topology=Topology())
    assert 0 < report.worst_error < BACKEND.formats["fp8_block"].tolerance
    got, topk, experts, x = run_alone(100)
    assert got.dtype == torch.bfloat16
    assert hostile.relative_error(got, twin(x, topk, experts, arch, DEEPSEEK_V4)) < 2e-2


# ---- layouts ----


def test_scales_are_m_major_with_a_pitch_of_four() -> None:
    scale = torch.rand(3, 5, 7)
    view = deep_gemm_layout.m_major(scale)
    assert torch.equal(view, scale)
    assert view.stride() == (56, 1, 8)
    assert deep_gemm_layout.m_major(view).data_ptr() == view.data_ptr(), "no copy where the layout is right"
    assert deep_gemm_layout.m_major(torch.rand(5, 7)).stride() == (1, 8)
    sliced = view[..., :4]
    assert deep_gemm_layout.m_major(sliced).stride() == (32, 1, 8), "the library refuses a gap between experts"
    assert torch.equal(deep_gemm_layout.m_major(sliced), scale[..., :4])


def test_powers_of_two_and_packing() -> None:
    values = torch.tensor([1.0, 1.5, 2.0, 0.75, 2.0**-20, 3e-5])
    assert round_up_to_power_of_two(values).tolist() == [1.0, 2.0, 2.0, 1.0, 2.0**-20, 2.0**-15]
    scales = torch.tensor([[1.0, 2.0, 4.0, 0.5, 8.0]])
    packed = pack_ue8m0(scales)
    assert packed.tolist() == [[127 | 128 << 8 | 129 << 16 | 126 << 24, 130]]
    assert torch.equal(unpack_ue8m0(packed, 5), scales)


def test_token_groups_golden_values() -> None:
    x = torch.zeros(1, 256)
    x[0, :4] = torch.tensor([-1.0, 0.001, 0.3, 3.5])
    codes, scales = quantize_token_groups(x)
    assert scales[0, 0].item() == 0.0078125
    assert codes.view(torch.uint8)[0, :4].tolist() == [0xF0, 0x20, 0x62, 0x7E]
    assert torch.equal(dequantize_token_groups(codes, scales), activation_quant.fp8_groups(x, experts_of().w13))


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


def test_rows_past_an_experts_count_visit_no_expert() -> None:
    """They hold garbage, and computing them costs as much as computing real ones."""
    ids, weights = masked_rows(torch.tensor([2, 0, 3], dtype=torch.int32), 3)
    assert ids.flatten().tolist() == [0, 0, -1, -1, -1, -1, 2, 2, 2]
    assert weights.flatten().tolist() == [1.0] * 9


@pytest.mark.parametrize("names", [emulated.NAMES_NOW, emulated.NAMES_BEFORE, emulated.NAMES_FIRST])
def test_kernel_names_of_every_release(monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]) -> None:
    emulator = install_deep_gemm(monkeypatch, names=names)
    run_alone(5)
    assert emulator.calls == ["masked", "masked"]


# ---- refusals ----


def test_missing_package_and_unknown_release(monkeypatch: pytest.MonkeyPatch) -> None:
    install_deep_gemm(monkeypatch)
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(UnsupportedPathError, match="needs the package deep_gemm"):
        run_alone(1)
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace())
    with pytest.raises(UnsupportedPathError, match="has none of m_grouped_fp8_gemm_nt_masked"):
        run_alone(1)


def test_wrong_weights_sizes_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    install_deep_gemm(monkeypatch, "sm80")
    config = several_ranks.layer_config(experts_of(), torch.bfloat16)
    with pytest.raises(UnsupportedPathError, match="fp8_block on sm80 is not supported"):
        BACKEND.prepare(experts_of(), config, Topology())
    small = experts_of(H, 64)
    with pytest.raises(WeightFormatError, match="intermediate_size of this rank is 64"):
        BACKEND.prepare(small, several_ranks.layer_config(small, torch.bfloat16), Topology())
    w13, w2 = hostile.dense_experts(E, H, I)
    with pytest.raises(WeightFormatError, match="takes fp8_block experts, got bf16"):
        BACKEND.prepare(ExpertWeights(w13=Bf16Weight.quantize(w13), w2=Bf16Weight.quantize(w2)), config, Topology())
    b13, b2 = hostile.biases(E, H, I)
    biased = ExpertWeights(w13=experts_of().w13, w2=experts_of().w2, b13=b13, b2=b2)
    with pytest.raises(WeightFormatError, match="biases"):
        BACKEND.prepare(biased, config, Topology())


def test_overlap_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install_deep_gemm(monkeypatch)
    config = several_ranks.layer_config(experts_of(), torch.bfloat16)
    runner = MoeRunner(MoeBackend.DEEP_GEMM, MoeA2ABackend.NONE, config)
    runner.set_overlap_args("stream")
    with pytest.raises(MoeConfigError, match="cannot overlap"):
        runner.run(
            StandardDispatchOutput(hostile.tokens(3, H), hostile.routing(3, E, K)),
            BACKEND.prepare(experts_of(), config, Topology()),
        )


@pytest.mark.parametrize(
    ("arch", "format_name", "a2a", "dtype", "word"),
    [
        ("sm90", "fp8_block", "none", torch.bfloat16, None),
        ("sm100", "fp8_block", "deepep", torch.bfloat16, None),
        ("sm90", "fp8_block", "mooncake", torch.bfloat16, None),
        ("sm80", "fp8_block", "none", torch.bfloat16, "sm80"),
        ("gfx942", "fp8_block", "none", torch.bfloat16, "gfx942"),
        ("sm90", "nvfp4", "none", torch.bfloat16, "nvfp4"),
        ("sm90", "fp8_block", "mori", torch.bfloat16, "mori"),
        ("sm90", "fp8_block", "none", torch.float32, "float32"),
    ],
)
def test_supports(arch: str, format_name: str, a2a: str, dtype: torch.dtype, word: str | None) -> None:
    config = several_ranks.layer_config(experts_of(), dtype)
    reason = BACKEND.supports(Device(arch=arch), format_name, MoeA2ABackend(a2a), config)
    assert (reason is None) if word is None else (reason is not None and word in reason)


def test_a_shard_that_splits_a_block_is_refused_before_weights_are_read() -> None:
    config = several_ranks.layer_config(experts_of(), torch.bfloat16, intermediate_size=64)
    reason = BACKEND.supports(Device(arch="sm90"), "fp8_block", MoeA2ABackend.NONE, config)
    assert reason is not None
    assert "intermediate_size of this rank is 64" in reason
    assert "128" in reason


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
