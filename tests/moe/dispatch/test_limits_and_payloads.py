"""DeepEP's limits and the payload choice: pure functions, as tables."""

import pytest
import torch

from moe.backend import DispatchContext
from moe.config import DispatchDtype, DispatchFormat, MoeBackend
from moe.dispatch.deepep_settings import (
    DeepepMode,
    DeepepSettings,
    EpShape,
    check_deepep,
    check_queue_depth,
    ll_hidden_size,
    queue_depth_to_ask_for,
    why_not_capturable,
)
from moe.errors import MoeConfigError, UnsupportedPathError
from moe.registry import BACKEND_MODULES, load_backend
from tests.tables import rows

LL, NORMAL, AUTO = DeepepMode.LOW_LATENCY, DeepepMode.NORMAL, DeepepMode.AUTO


def shape(**changes: int) -> EpShape:
    return EpShape(**({"hidden_size": 7168, "num_experts": 256, "top_k": 8, "ep_size": 8} | changes))


@rows(
    "mode, ep_sizes",
    (LL, [1, 2, 3, 4, 5, 7, 8, 16, 64]),
    (NORMAL, [2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160]),
)
def test_rank_counts(mode: DeepepMode, ep_sizes: list[int]) -> None:
    for size in ep_sizes:
        check_deepep(DeepepSettings(mode=mode), shape(ep_size=size, num_experts=size * 4), sends_fp8=True)


@rows(
    "mode, changes, sends_fp8, words",
    (LL, {"hidden_size": 9000}, False, ["hidden size 9000", "8192"]),
    (LL, {"hidden_size": 2880}, True, ["hidden size 2880", "128"]),
    (LL, {"ep_size": 12, "num_experts": 240}, False, ["--expert-parallel-size is 12", "multiple of 8"]),
    (LL, {"top_k": 12}, False, ["top_k is 12", "at most 11"]),
    (LL, {"ep_size": 1, "num_experts": 1025}, False, ["1025 experts a rank", "1024"]),
    (NORMAL, {"ep_size": 1}, False, ["--expert-parallel-size is 1", "2, 4, 8"]),
    (NORMAL, {"ep_size": 3, "num_experts": 6}, False, ["--expert-parallel-size is 3"]),
    (NORMAL, {"ep_size": 40, "num_experts": 80}, False, ["--expert-parallel-size is 40", "20 nodes of 8"]),
    (NORMAL, {"top_k": 33}, False, ["top_k is 33", "at most 32"]),
    (NORMAL, {"hidden_size": 2884}, False, ["hidden size 2884", "multiple of 8"]),
    (AUTO, {"top_k": 12}, False, ["top_k is 12"]),
    (AUTO, {"ep_size": 1}, False, ["--expert-parallel-size is 1"]),
)
def test_refusals_name_numbers(mode: DeepepMode, changes: dict[str, int], sends_fp8: bool, words: list[str]) -> None:
    with pytest.raises(UnsupportedPathError) as error:
        check_deepep(DeepepSettings(mode=mode), shape(**changes), sends_fp8=sends_fp8)
    for word in words:
        assert word in str(error.value)


@rows(
    "changes, tokens, error, words",
    ({"ep_size": 7}, 128, MoeConfigError, "--expert-parallel-size is 7: it must divide the 256 experts"),
    ({"tp_size": 2}, 128, UnsupportedPathError, "--tensor-parallel-size of the experts is 2"),
    ({"ep_size": 1}, 6, MoeConfigError, "--deepep-max-dispatch-tokens is 6: times 1 ranks"),
)
def test_shares_and_pitch(changes: dict[str, int], tokens: int, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        check_deepep(DeepepSettings(mode=LL, max_dispatch_tokens=tokens), shape(**changes), sends_fp8=False)


@rows("tokens, depth", (511, 1024), (1023, 2048), (1, 4), (1023, None))
def test_token_limits_that_fit_the_queue(tokens: int, depth: int | None) -> None:
    check_queue_depth(DeepepSettings(mode=LL, max_dispatch_tokens=tokens), depth)


@rows("tokens, depth", (512, 1024), (1024, 2048), (2, 4))
def test_token_limits_that_overrun_the_queue(tokens: int, depth: int) -> None:
    """G67: the remedy named is one that deep_ep reads."""
    with pytest.raises(MoeConfigError) as error:
        check_queue_depth(DeepepSettings(max_dispatch_tokens=tokens), depth)
    for word in (
        f"--deepep-max-dispatch-tokens is {tokens}", f"deep_ep uses {depth}", f"NVSHMEM_QP_DEPTH={2 * (tokens + 1)}",
        f"at most {depth // 2 - 1} tokens",
    ):  # fmt: skip
        assert word in str(error.value)
    check_queue_depth(DeepepSettings(mode=NORMAL, max_dispatch_tokens=tokens), depth)


@rows("tokens", 0, 1025)
def test_token_limits_are_checked_for_low_latency_alone(tokens: int) -> None:
    """G67: settings without a transport are never refused; check_deepep runs when one is built."""
    settings = DeepepSettings(max_dispatch_tokens=tokens)
    with pytest.raises(MoeConfigError, match=rf"--deepep-max-dispatch-tokens is {tokens}: it must lie in 1\.\.1024"):
        check_deepep(settings, shape(), sends_fp8=False)
    check_deepep(DeepepSettings(mode=NORMAL, max_dispatch_tokens=tokens), shape(), sends_fp8=False)


@rows("hidden, sent", (2048, 2048), (2049, 2560), (2880, 3072), (7168, 7168), (64, 2048))
def test_hidden_sizes_are_padded_to_a_compiled_one(hidden: int, sent: int) -> None:
    assert ll_hidden_size(hidden) == sent


def test_capture_follows_the_dispatch_limit() -> None:
    assert why_not_capturable(DeepepSettings(max_dispatch_tokens=128), 128) is None
    assert why_not_capturable(DeepepSettings(mode=LL, max_dispatch_tokens=128), 128) is None
    too_many = why_not_capturable(DeepepSettings(max_dispatch_tokens=128), 129)
    assert "is 128, but graphs are captured for up to 129" in str(too_many)
    assert "--deepep-mode normal cannot run in CUDA graphs" in str(why_not_capturable(DeepepSettings(mode=NORMAL), 1))


@rows(
    "mode, tokens, depth",
    (LL, 511, None), (LL, 512, 2048), (AUTO, 1023, 2048), (AUTO, 1024, 4096), (NORMAL, 1024, None),
)  # fmt: skip
def test_a_deeper_queue_is_asked_for_only_where_needed(mode: DeepepMode, tokens: int, depth: int | None) -> None:
    assert queue_depth_to_ask_for(DeepepSettings(mode=mode, max_dispatch_tokens=tokens)) == depth


LOW, NORM, STD = DispatchFormat.DEEPEP_LL, DispatchFormat.DEEPEP_NORMAL, DispatchFormat.STANDARD
MORI, MORI_LL, FLASH = DispatchFormat.MORI_NORMAL, DispatchFormat.MORI_LL, DispatchFormat.FLASHINFER
DEEP_GEMM, CUTEDSL, AITER = MoeBackend.DEEP_GEMM, MoeBackend.FLASHINFER_CUTEDSL, MoeBackend.AITER


def dispatch_dtype_of(
    backend: MoeBackend, layout: DispatchFormat, weights: str, knows_scale: bool = False, can_nvfp4: bool = False
) -> DispatchDtype:
    context = DispatchContext(
        dispatch_format=layout, format_name=weights, device=torch.device("cpu"), knows_input_scale=knows_scale,
        can_send_nvfp4=can_nvfp4,
    )  # fmt: skip
    return load_backend(backend).dispatch_dtype(context)


@rows(
    "backend, layout, weights, scale, option, dispatch_dtype",
    (DEEP_GEMM, STD, "fp8_block", False, False, "bf16"),
    (CUTEDSL, LOW, "nvfp4", False, False, "bf16"),
    (CUTEDSL, LOW, "nvfp4", True, False, "bf16"),
    (CUTEDSL, LOW, "nvfp4", False, True, "bf16"),
    (CUTEDSL, LOW, "nvfp4", True, True, "nvfp4"),
    (CUTEDSL, NORM, "nvfp4", True, True, "bf16"),
    (CUTEDSL, FLASH, "nvfp4", True, True, "nvfp4"),
    (CUTEDSL, FLASH, "nvfp4", False, True, "bf16"),
    (AITER, MORI, "fp8_block", False, False, "fp8"),
    (AITER, MORI_LL, "fp8_block", False, False, "fp8"),
    (AITER, MORI, "fp8_tensor", False, False, "bf16"),
    (AITER, MORI, "mxfp4", False, False, "bf16"),
    (AITER, MORI_LL, "bf16", False, False, "bf16"),
    (AITER, STD, "fp8_block", False, False, "bf16"),
)
def test_dispatch_dtype_truth_table(
    backend: MoeBackend, layout: DispatchFormat, weights: str, scale: bool, option: bool, dispatch_dtype: str
) -> None:
    assert dispatch_dtype_of(backend, layout, weights, scale, option) is DispatchDtype(dispatch_dtype)


@rows("capability, fp8", ((9, 0), DispatchDtype.FP8), ((10, 0), DispatchDtype.FP8_UE8M0))
@rows("can_nvfp4", False, True)
def test_every_backend_that_does_not_read_fp8_gets_bf16_from_deepep(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fp8: DispatchDtype, can_nvfp4: bool
) -> None:
    """Power-of-two scales are DeepGEMM's alone, on SM100."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for backend in set(BACKEND_MODULES) - ({CUTEDSL} if can_nvfp4 else set()):
        for layout in (LOW, NORM):
            for weights in ("bf16", "fp8_block", "fp8_tensor", "mxfp4", "nvfp4"):
                dispatch_dtype = dispatch_dtype_of(backend, layout, weights, can_nvfp4, can_nvfp4)
                assert dispatch_dtype is (fp8 if backend is DEEP_GEMM else DispatchDtype.BF16)


def test_expert_alignment_and_row_multiples() -> None:
    backends = [load_backend(backend) for backend in (DEEP_GEMM, CUTEDSL, MoeBackend.TORCH, AITER)]
    assert [backend.expert_alignment for backend in backends] == [128, 1, 1, 1]
    assert [backend.row_multiple for backend in backends] == [4, 128, 4, 4]
