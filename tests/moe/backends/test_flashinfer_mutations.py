"""Faults that others have shipped, planted one by one: each must be refused or far off."""

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from moe import StandardTopK, Topology
from moe.backends.flashinfer import cutedsl, cutlass, mxfp4, trtllm
from moe.formats import Nvfp4Weight
from moe.layouts import rows as layouts
from moe.layouts.static_scales import one_scale_fp8, one_scale_nvfp4
from moe.types import DeepepLlDispatchOutput, RowsCombineInput
from tests.emulators.refusal import KernelRefusal
from tests.moe.backends.scenarios import PATHS, install, prepare, run_scenario, tolerance
from tests.tables import rows

MODULES = {"mxfp4": mxfp4, "cutlass": cutlass, "trtllm": trtllm, "cutedsl": cutedsl}
Plant = Callable[[pytest.MonkeyPatch, str], None]


def family_of(path: str) -> str:
    return path.partition("-")[0]


def flipped(halves: torch.Tensor) -> torch.Tensor:
    return torch.cat(tuple(reversed(halves.chunk(2, dim=1))), dim=1)


def nibbles_swapped(codes: torch.Tensor) -> torch.Tensor:
    return (codes >> 4) | (codes << 4)


def mangled(scales: torch.Tensor) -> torch.Tensor:
    """Written transposed into the same memory."""
    return scales.transpose(1, 2).reshape(scales.shape)


def wrap_argument(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[[Any], Any], at: int = 0) -> None:
    """Change one positional argument on its way into `owner.name`."""
    genuine = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return genuine(*args[:at], change(args[at]), *args[at + 1 :], **kwargs)

    patch.setattr(owner, name, changed)


def change_staged(patch: pytest.MonkeyPatch, **changes: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change fields of the padded MXFP4 bytes."""
    for name in ("_prepare_sm90", "_prepare_sm100"):
        wrap_argument(
            patch, mxfp4, name,
            lambda staged: dataclasses.replace(
                staged, **{field: change(getattr(staged, field)) for field, change in changes.items()}
            ),
        )  # fmt: skip


def change_v1_weights(patch: pytest.MonkeyPatch, change: Callable[[Nvfp4Weight], Nvfp4Weight]) -> None:
    wrap_argument(patch, cutedsl, "_prepare_v1", change, at=1)


def change_kernel_keyword(patch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    from flashinfer import fused_moe

    genuine = fused_moe.cutlass_fused_moe
    patch.setattr(fused_moe, "cutlass_fused_moe", lambda **kwargs: genuine(**(kwargs | change(kwargs))))


def swapped_halves(patch: pytest.MonkeyPatch, path: str) -> None:
    family = family_of(path)
    if family == "mxfp4":
        wrap_argument(patch, mxfp4, "up_gate_padded", flipped)
    elif path == "cutedsl-v1":
        change_v1_weights(patch, lambda w: dataclasses.replace(w, codes=flipped(w.codes), scales=flipped(w.scales)))
    else:
        wrap_argument(patch, MODULES[family], "up_gate", flipped)


def transposed_scale(patch: pytest.MonkeyPatch, path: str) -> None:
    family, kind = path.split("-")
    if family == "mxfp4":
        change_staged(patch, scales13=mangled)
    elif kind == "fp8_block":
        wrap_argument(patch, MODULES[family], "up_gate", lambda t: mangled(t) if t.dtype == torch.float32 else t)
    elif family == "trtllm":
        wrap_argument(patch, trtllm, "shuffled_scales", mangled)
    else:
        wrap_argument(patch, MODULES[family], "swizzle_128x4", mangled)


def transposed_activation_scale(patch: pytest.MonkeyPatch, path: str) -> None:
    del path
    genuine = trtllm.quantize_token_groups

    def changed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = genuine(x)
        return codes, scales.reshape(scales.shape[1], scales.shape[0]).T

    patch.setattr(trtllm, "quantize_token_groups", changed)


def per_expert_alphas(patch: pytest.MonkeyPatch, path: str) -> None:
    """Each expert's own input scale in its alpha, although all inputs are quantized with the layer's."""
    family = family_of(path)
    name, genuine = (
        ("one_scale_fp8", one_scale_fp8) if path.endswith("fp8_tensor") else ("one_scale_nvfp4", one_scale_nvfp4)
    )

    def changed(weight: Any) -> tuple[torch.Tensor, torch.Tensor]:
        data, scale = genuine(weight)
        return data, scale * weight.input_scale / weight.input_scale.max()

    patch.setattr(MODULES[family], name, changed)


def scale_weights(patch: pytest.MonkeyPatch, path: str, factor: float) -> None:
    if path.startswith("trtllm"):
        genuine = trtllm._routing

        def changed(info: Any, topk: Any) -> tuple[str, dict[str, Any]]:
            suffix, arguments = genuine(info, topk)
            return suffix, arguments | {"routed_scaling_factor": arguments["routed_scaling_factor"] * factor}

        patch.setattr(trtllm, "_routing", changed)
    elif path == "cutedsl-v1":  # the transport multiplies: weights that come back changed count twice, or not
        genuine_result = DeepepLlDispatchOutput.result

        def weighted(dispatched: DeepepLlDispatchOutput, out: torch.Tensor, is_partial: bool) -> RowsCombineInput:
            result = genuine_result(dispatched, out, is_partial)
            return dataclasses.replace(result, topk_weights=result.topk_weights * factor)

        patch.setattr(DeepepLlDispatchOutput, "result", weighted)
    else:
        patch.setattr(StandardTopK, "to_standard", lambda topk: StandardTopK(topk.weights * factor, topk.ids))


def factor_twice(patch: pytest.MonkeyPatch, path: str) -> None:
    scale_weights(patch, path, 2.5)


def factor_never(patch: pytest.MonkeyPatch, path: str) -> None:
    scale_weights(patch, path, 1 / 2.5)


def offset_off_by_one(patch: pytest.MonkeyPatch, path: str) -> None:
    if path == "mxfp4-sm90" or path.startswith("cutlass"):
        change_kernel_keyword(patch, lambda kwargs: {"ep_rank": (kwargs["ep_rank"] + 1) % kwargs["ep_size"]})
        return
    genuine = Topology.expert_range

    def shifted(topology: Topology, num_experts: int) -> range:
        own = genuine(topology, num_experts)
        return range(own.start - 1, own.stop - 1) if own.start else range(1, own.stop + 1)

    patch.setattr(Topology, "expert_range", shifted)


def rows_padded_at_the_end(patch: pytest.MonkeyPatch, path: str) -> None:
    del path

    def changed(gate_up: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
        return layouts.padded(layouts.up_gate(gate_up), 2 * rows, cols)

    patch.setattr(mxfp4, "up_gate_padded", changed)


def bias_on_every_rank(patch: pytest.MonkeyPatch, path: str) -> None:
    if path == "mxfp4-sm100":
        wrap_argument(patch, mxfp4, "_prepare_sm100", lambda topology: dataclasses.replace(topology, tp_rank=0), at=2)
    else:
        change_kernel_keyword(patch, lambda kwargs: {"tp_rank": 0})


def wrong_nibble_order(patch: pytest.MonkeyPatch, path: str) -> None:
    family = family_of(path)
    if family == "mxfp4":
        change_staged(patch, codes13=nibbles_swapped)
    elif path == "cutedsl-v1":
        change_v1_weights(patch, lambda w: dataclasses.replace(w, codes=nibbles_swapped(w.codes)))
    else:
        wrap_argument(patch, MODULES[family], "up_gate", lambda t: nibbles_swapped(t) if t.dtype == torch.uint8 else t)


def not_interleaved(patch: pytest.MonkeyPatch, path: str) -> None:
    del path
    patch.setattr(cutedsl, "interleave_halves", lambda halves: halves)


def contiguous_scale_view(patch: pytest.MonkeyPatch, path: str) -> None:
    del path
    patch.setattr(cutedsl, "mma_view", lambda scales: layouts.mma_view(scales).contiguous())


FP4 = ("mxfp4-sm90", "mxfp4-sm100", "cutlass-nvfp4", "trtllm-nvfp4", "cutedsl-v1", "cutedsl-v2")
STATIC = ("cutlass-fp8_tensor", "cutlass-nvfp4", "trtllm-fp8_tensor", "trtllm-nvfp4", "cutedsl-v1", "cutedsl-v2")
SCALED = tuple(path for path in PATHS if not path.endswith(("bf16", "fp8_tensor")))
MUTATIONS: list[tuple[Plant, tuple[str, ...]]] = [
    (swapped_halves, PATHS),
    (transposed_scale, SCALED),
    (transposed_activation_scale, ("trtllm-fp8_block",)),
    (per_expert_alphas, STATIC),
    (factor_twice, PATHS),
    (factor_never, PATHS),
    (offset_off_by_one, tuple(path for path in PATHS if path != "cutedsl-v1")),  # v1 gets slots, not ids
    (rows_padded_at_the_end, ("mxfp4-sm90", "mxfp4-sm100")),
    (bias_on_every_rank, ("mxfp4-sm90", "mxfp4-sm100", "cutlass-bf16")),
    (wrong_nibble_order, FP4),
    (not_interleaved, ("cutedsl-v2",)),
    (contiguous_scale_view, ("cutedsl-v1", "cutedsl-v2")),
]


def test_without_a_fault_the_scenario_is_exact(subtests: pytest.Subtests) -> None:
    for path in PATHS:
        with subtests.test(path=path), pytest.MonkeyPatch.context() as patch:
            assert run_scenario(install(patch, path), path) < tolerance(path)


@rows("plant, paths", *MUTATIONS)
def test_a_planted_fault_is_caught(subtests: pytest.Subtests, plant: Plant, paths: tuple[str, ...]) -> None:
    for path in paths:
        with subtests.test(path=path), pytest.MonkeyPatch.context() as patch:
            prepare(path)
            emulator = install(patch, path)
            plant(patch, path)
            with suppress(KernelRefusal):
                assert not run_scenario(emulator, path) <= 10 * tolerance(path)  # NaN counts as caught
