"""Faults that others have shipped, planted one by one: each must be refused or far off."""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from moe import StandardTopK, Topology
from moe.backends.aiter import backend as aiter
from moe.backends.aiter import gpt_oss
from moe.backends.aiter import permutes as aiter_permutes
from moe.backends.deep_gemm import permutes as deep_gemm_permutes
from moe.backends.flashinfer import cutedsl, cutlass, mxfp4, trtllm
from moe.config import MoeA2ABackend
from moe.dispatch.deepep_settings import DeepepMode
from moe.formats import ExpertWeights
from moe.layouts import rows as layouts
from moe.layouts.static_scales import one_scale_fp8, one_scale_nvfp4
from moe.registry import load_backend
from moe.types import DeepepLlDispatchOutput, RowsCombineInput
from tests.emulators.deepep import install_deepep
from tests.emulators.refusal import KernelRefusal
from tests.moe.backends import contract, cutedsl_cases, hostile
from tests.moe.backends.contract import AITER, CUTEDSL, CUTLASS, DEEP_GEMM, MXFP4, PATHS, TRTLLM, Path, path_of
from tests.moe.backends.deep_gemm_cases import run_deepep
from tests.moe.moe_layers import DEEPSEEK_V4
from tests.tables import rows

MODULES = {MXFP4: mxfp4, CUTLASS: cutlass, TRTLLM: trtllm, CUTEDSL: cutedsl}
Plant = Callable[[pytest.MonkeyPatch, Path], None]
V1 = dataclasses.replace(path_of(CUTEDSL), a2a=MoeA2ABackend.DEEPEP)
V2 = path_of(CUTEDSL)
SM90, DEEP = path_of(MXFP4, arch="sm90", has_biases=True), path_of(DEEP_GEMM)
SM100 = path_of(MXFP4, arch="sm100", has_biases=True)
AITER_FP4, AITER_GPT_OSS = (path_of(AITER, format_name="mxfp4", has_biases=has_biases) for has_biases in (False, True))
ALL = (
    *(path for path in PATHS if path.is_flashinfer and path.activation != DEEPSEEK_V4),
    V1,
    DEEP,
    AITER_FP4,
    AITER_GPT_OSS,
)


def runs_cutlass(path: Path) -> bool:
    return path.backend is CUTLASS or (path.backend, path.arch) == (MXFP4, "sm90")


# ---- ways to plant ----


def wrap_argument(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[[Any], Any], at: int = 0) -> None:
    """Change one positional argument on its way into `owner.name`."""
    genuine = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return genuine(*args[:at], change(args[at]), *args[at + 1 :], **kwargs)

    patch.setattr(owner, name, changed)


def change_experts(patch: pytest.MonkeyPatch, path: Path, change: Callable[[ExpertWeights], ExpertWeights]) -> None:
    wrap_argument(patch, type(load_backend(path.backend)), "lay_out", change, at=1)


def change_matrices(experts: ExpertWeights, change: Callable[[torch.Tensor], torch.Tensor], *names: str) -> Any:
    """Change the tensors [E, rows, columns] of both weights that have one of these names."""

    def changed(weight: Any) -> Any:
        return dataclasses.replace(
            weight, **{name: change(getattr(weight, name)) for name in names if hasattr(weight, name)}
        )

    return dataclasses.replace(experts, w13=changed(experts.w13), w2=changed(experts.w2))


def change_kernel_keyword(patch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    from flashinfer import fused_moe

    genuine = fused_moe.cutlass_fused_moe
    patch.setattr(fused_moe, "cutlass_fused_moe", lambda **kwargs: genuine(**(kwargs | change(kwargs))))


def aiter_input(change: Callable[[Any], dict[str, Any]]) -> Callable[[pytest.MonkeyPatch], None]:
    """Change what aiter's runner core gets."""

    def changed(core: Any) -> Any:
        return dataclasses.replace(core, **change(core))

    return lambda patch: wrap_argument(patch, aiter.AiterRunnerCore, "run", changed, at=1)


# ---- faults ----


def swapped_halves(patch: pytest.MonkeyPatch, path: Path) -> None:
    def flipped(experts: ExpertWeights) -> ExpertWeights:
        size, w13 = experts.intermediate_size, experts.w13
        rolled = hostile.joined(w13.narrow(1, size, size), w13.narrow(1, 0, size))
        return dataclasses.replace(experts, w13=rolled)

    change_experts(patch, path, flipped)


def transposed_scale(patch: pytest.MonkeyPatch, path: Path) -> None:
    """Written transposed into the same memory."""

    def mangled(scales: torch.Tensor) -> torch.Tensor:
        return scales.transpose(1, 2).reshape(scales.shape)

    change_experts(patch, path, lambda experts: change_matrices(experts, mangled, "scales", "scale_inv"))


def scale_of_another_expert(patch: pytest.MonkeyPatch, path: Path) -> None:
    change_experts(patch, path, lambda experts: change_matrices(experts, lambda x: x.roll(1, 0), "scales", "scale_inv"))


def wrong_nibble_order(patch: pytest.MonkeyPatch, path: Path) -> None:
    change_experts(patch, path, lambda experts: change_matrices(experts, lambda x: (x >> 4) | (x << 4), "codes"))


def transposed_activation_scale(patch: pytest.MonkeyPatch, path: Path) -> None:
    genuine = trtllm.quantize_token_groups

    def changed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = genuine(x)
        return codes, scales.reshape(scales.shape[1], scales.shape[0]).T

    patch.setattr(trtllm, "quantize_token_groups", changed)


def per_expert_alphas(patch: pytest.MonkeyPatch, path: Path) -> None:
    """Each expert's own input scale in its alpha, although all inputs are quantized with the layer's."""
    genuine = one_scale_fp8 if path.format_name == "fp8_tensor" else one_scale_nvfp4

    def changed(weight: Any) -> tuple[torch.Tensor, torch.Tensor]:
        data, scale = genuine(weight)
        return data, scale * weight.input_scale / weight.input_scale.max()

    patch.setattr(MODULES[path.backend], genuine.__name__, changed)


def scale_weights(patch: pytest.MonkeyPatch, path: Path, factor: float) -> None:
    if path.backend is TRTLLM:
        genuine = trtllm._routing

        def changed(info: Any, topk: Any) -> tuple[str, dict[str, Any]]:
            suffix, arguments = genuine(info, topk)
            return suffix, arguments | {"routed_scaling_factor": arguments["routed_scaling_factor"] * factor}

        patch.setattr(trtllm, "_routing", changed)
    elif path is V1:  # the transport multiplies: weights that come back changed count twice, or not
        genuine_result = DeepepLlDispatchOutput.result

        def weighted(dispatched: DeepepLlDispatchOutput, out: torch.Tensor, is_partial: bool) -> RowsCombineInput:
            result = genuine_result(dispatched, out, is_partial)
            return dataclasses.replace(result, topk_weights=result.topk_weights * factor)

        patch.setattr(DeepepLlDispatchOutput, "result", weighted)
    else:
        patch.setattr(StandardTopK, "to_standard", lambda topk: StandardTopK(topk.weights * factor, topk.ids))


def factor_twice(patch: pytest.MonkeyPatch, path: Path) -> None:
    scale_weights(patch, path, hostile.FACTOR)


def factor_never(patch: pytest.MonkeyPatch, path: Path) -> None:
    scale_weights(patch, path, 1 / hostile.FACTOR)


def weights_to_the_power(power: int, patch: pytest.MonkeyPatch, path: Path) -> None:
    """Never applied, or twice."""
    patch.setattr(StandardTopK, "to_standard", lambda topk: StandardTopK(topk.weights**power, topk.ids))


def offset_off_by_one(patch: pytest.MonkeyPatch, path: Path) -> None:
    if runs_cutlass(path):
        change_kernel_keyword(patch, lambda kwargs: {"ep_rank": (kwargs["ep_rank"] + 1) % kwargs["ep_size"]})
        return
    genuine = Topology.expert_range

    def shifted(topology: Topology, num_experts: int) -> range:
        own = genuine(topology, num_experts)
        return range(own.start - 1, own.stop - 1) if own.start else range(1, own.stop + 1)

    patch.setattr(Topology, "expert_range", shifted)


def rows_padded_at_the_end(patch: pytest.MonkeyPatch, path: Path) -> None:
    def changed(gate_up: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
        return layouts.padded(layouts.up_gate(gate_up), 2 * rows, cols)

    patch.setattr(mxfp4, "up_gate_padded", changed)


def bias_on_every_rank(patch: pytest.MonkeyPatch, path: Path) -> None:
    if runs_cutlass(path):
        change_kernel_keyword(patch, lambda kwargs: {"tp_rank": 0})
        return
    owner, name, at = (aiter, "prepare_gpt_oss", 3) if path.backend is AITER else (mxfp4, "_prepare_sm100", 2)
    wrap_argument(patch, owner, name, lambda topology: dataclasses.replace(topology, tp_rank=0), at)


def not_interleaved(patch: pytest.MonkeyPatch, path: Path) -> None:
    owner = gpt_oss if path.backend is AITER else cutedsl
    patch.setattr(owner, "interleave_halves", lambda halves, *_: halves)


def contiguous_scale_view(patch: pytest.MonkeyPatch, path: Path) -> None:
    patch.setattr(cutedsl, "mma_view", lambda scales: layouts.mma_view(scales).contiguous())


def weight_not_shuffled(patch: pytest.MonkeyPatch, path: Path) -> None:
    patch.setattr(aiter, "shuffle_weight", lambda codes: codes)


def scale_not_shuffled(patch: pytest.MonkeyPatch, path: Path) -> None:
    patch.setattr(gpt_oss if path is AITER_GPT_OSS else aiter, "shuffle_e8m0", lambda scales: scales)


def change_gpt_oss(patch: pytest.MonkeyPatch, change: Callable[[Any], dict[str, Any]]) -> None:
    genuine = gpt_oss.GptOssParts.arguments
    patch.setattr(gpt_oss.GptOssParts, "arguments", lambda parts: genuine(parts) | change(parts))


def padding_not_told(patch: pytest.MonkeyPatch, path: Path) -> None:
    change_gpt_oss(patch, lambda parts: {"hidden_pad": parts.hidden_pad + 128})


FP4 = tuple(path for path in ALL if path.format_name.endswith("fp4"))
STATIC = tuple(path for path in ALL if path.format_name in ("fp8_tensor", "nvfp4"))
SCALED = tuple(path for path in ALL if path.format_name not in ("bf16", "fp8_tensor"))
BIASED = tuple(path for path in ALL if path.has_biases)
MUTATIONS: list[tuple[Plant, tuple[Path, ...]]] = [
    (swapped_halves, ALL),
    (transposed_scale, SCALED),
    (scale_of_another_expert, SCALED),
    (transposed_activation_scale, (path_of(TRTLLM, format_name="fp8_block"),)),
    (per_expert_alphas, STATIC),
    (factor_twice, ALL),
    (factor_never, ALL),
    (functools.partial(weights_to_the_power, 2), (DEEP, AITER_FP4)),
    (functools.partial(weights_to_the_power, 0), (DEEP, AITER_FP4)),
    (offset_off_by_one, tuple(path for path in ALL if path is not V1)),  # v1 gets slots, not ids
    (rows_padded_at_the_end, (SM90, SM100)),
    (bias_on_every_rank, BIASED),
    (wrong_nibble_order, FP4),
    (not_interleaved, (V2, AITER_GPT_OSS)),
    (contiguous_scale_view, (V1, V2)),
    (scale_not_shuffled, (AITER_FP4, AITER_GPT_OSS)),
    (padding_not_told, (AITER_GPT_OSS,)),
    (weight_not_shuffled, (AITER_FP4,)),
]


@rows("plant, paths", *MUTATIONS)
def test_a_planted_fault_is_caught(subtests: pytest.Subtests, plant: Plant, paths: tuple[Path, ...]) -> None:
    for path in paths:
        with subtests.test(path=str(path), a2a=path.a2a), pytest.MonkeyPatch.context() as patch:
            topk = contract.bypassed(contract.GROUPED) if path.backend is TRTLLM else contract.TOPK
            want = cutedsl_cases.expected_v1() if path is V1 else contract.expected_once(path, topk)
            emulator = contract.install(patch, path.backend, path.arch)
            plant(patch, path)
            with suppress(KernelRefusal):
                if path is V1:
                    total = cutedsl_cases.sum_of_v1(emulator, 2)
                else:
                    total = contract.sum_of_ranks(path, emulator, contract.tokens(path), topk, 2, 2)
                assert not hostile.relative_error(total, want) <= 10 * path.tolerance  # NaN counts as caught


def test_low_latency_output_weighted_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    contract.install(monkeypatch, DEEP_GEMM, "sm90")
    install_deepep(monkeypatch, wide=True)
    factor_twice(monkeypatch, V1)
    assert run_deepep(DeepepMode.LOW_LATENCY, "sm90", [4, 4]) > 1e-1


# ---- faults that a kernel refuses ----


def minus_one_passed_on(patch: pytest.MonkeyPatch) -> None:
    genuine = aiter_permutes.with_sink

    def changed(ids: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.functional.pad(ids.int(), (0, 1), value=8), genuine(ids, weights, mask)[1]

    patch.setattr(aiter_permutes, "with_sink", changed)


def flag_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(aiter, "mark_shuffled", lambda codes: codes.view(codes.dtype))


def bias_in_bf16(patch: pytest.MonkeyPatch) -> None:
    change_gpt_oss(patch, lambda parts: {"bias1": parts.b13.bfloat16()})


def negative_zero_carried_over(patch: pytest.MonkeyPatch) -> None:
    def with_negative_zero(codes: torch.Tensor) -> torch.Tensor:
        octets = codes.view(torch.uint8).clone()
        octets[..., 0] = 0x80
        return octets.view(codes.dtype)

    change_experts(patch, path_of(AITER), lambda experts: change_matrices(experts, with_negative_zero, "data"))
    patch.setattr(aiter, "to_fnuz", lambda codes: codes.view(torch.uint8).view(torch.float8_e4m3fnuz))


def row_major_scales(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(deep_gemm_permutes, "activation_scales", lambda scale, ue8m0: scale.contiguous())


def padding_without_an_expert(patch: pytest.MonkeyPatch) -> None:
    genuine = deep_gemm_permutes._contiguous

    def holes(*arguments: Any) -> Any:
        result = genuine(*arguments)
        result.m_indices[5::128] = -1
        return result

    patch.setattr(deep_gemm_permutes, "_contiguous", holes)


def counts_in_int64(patch: pytest.MonkeyPatch) -> None:
    genuine = deep_gemm_permutes.MaskedInput

    def wide_counts(**fields: Any) -> Any:
        return genuine(**(fields | {"masked_m": fields["masked_m"].long()}))

    patch.setattr(deep_gemm_permutes, "MaskedInput", wide_counts)


no_masked_column = aiter_input(lambda core: {"ids_RK": core.ids_RK[:, :-1], "weights_RK": core.weights_RK[:, :-1]})


@rows(
    "plant, path, count, words",
    (minus_one_passed_on, AITER_FP4, 23, "an id outside the mask"),
    (
        aiter_input(lambda core: {"ids_RK": core.ids_RK[:, :-1], "weights_RK": core.weights_RK[:, :-1]}),
        AITER_FP4,
        23,
        "the last column is taken for one that is always masked",
    ),
    (flag_lost, AITER_FP4, 23, "weights are not shuffled"),
    (aiter_input(lambda core: {"mask": core.mask.long()}), AITER_FP4, 23, "expert_mask must be int32"),
    (aiter_input(lambda core: {"ids_RK": core.ids_RK.long()}), AITER_FP4, 23, "topk_ids must be int32"),
    (
        lambda patch: change_gpt_oss(patch, lambda parts: {"bias1": parts.b13.bfloat16()}),
        AITER_GPT_OSS,
        23,
        "bias must be fp32",
    ),
    (negative_zero_carried_over, path_of(AITER, format_name="fp8_block"), 23, "NaN among the weights"),
    (row_major_scales, DEEP, 300, "scales must be M-major"),
    (padding_without_an_expert, DEEP, 300, "all rows of a segment carry one expert id"),
    (counts_in_int64, DEEP, 23, "masked_m is int32"),
)
def test_a_planted_fault_is_refused_by_the_kernel(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], path: Path, count: int, words: str
) -> None:
    contract.install(monkeypatch, path.backend, path.arch)
    plant(monkeypatch)
    topology = Topology(ep_size=2, ep_rank=1)
    run = contract.prepare(path, contract.shard(path, contract.make_experts(path), topology), topology)
    with pytest.raises((KernelRefusal, TypeError), match=words):
        run(contract.tokens(path, count), hostile.routing(count, contract.E, contract.K))
