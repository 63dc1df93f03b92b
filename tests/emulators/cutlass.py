"""The compiled module behind `cutlass_fused_moe`: bf16, MXFP4 (SM90), FP8 block, FP8 per tensor and NVFP4 (SM100).

Checks follow the C++ binding of flashinfer-python 0.7.2.post1 (commit beabf50). Weight halves are [up; gate] in every
mode.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.emulators import layouts, numbers
from tests.emulators.device import built, pretend_gpu, uncached
from tests.emulators.experts import DenseExperts
from tests.emulators.refusal import need


def words(text: str) -> list[str]:
    """Names of positional arguments, in order."""
    return text.split()


ARGUMENTS = words(
    "output input ids weights fc1 fc1_bias fc2 fc2_bias scales input_sf alpha beta limit relu_limit situ_beta "
    "situ_linear_beta swizzled_input_sf tp_size tp_rank ep_size ep_rank cluster_size cluster_rank enable_alltoall "
    "min_latency_mode profile_ids enable_pdl activation_type workspace"
)
OPTIONS = words("x_dtype w_dtype out_dtype fp8_block w4_group mxfp8 packed fused_finalize humming")
_KEYWORDS = {
    "output": "output", "input": "input", "ids": "token_selected_experts", "weights": "token_final_scales",
    "fc1": "fc1_expert_weights", "fc1_bias": "fc1_expert_biases", "fc2": "fc2_expert_weights",
    "fc2_bias": "fc2_expert_biases", "scales": "quant_scales", "alpha": "swiglu_alpha", "beta": "swiglu_beta",
    "limit": "swiglu_limit",
}  # fmt: skip


@dataclass
class CutlassEmulator:
    """One 'compiled' module. `calls` keeps the arguments of every launch, `exact` the fp32 result of the last one."""

    calls: list[SimpleNamespace] = field(default_factory=list)
    exact: torch.Tensor | None = None

    def set_deepgemm_jit_include_dirs(self, folders: list[str]) -> None:
        need(len(folders) == 1, "one include folder")

    def interleave_moe_weights_for_sm90_mixed_gemm(self, weight: torch.Tensor, out: torch.Tensor, kind: int) -> None:
        need(kind == 1, "only the fp4 layout of the bf16-activation path is emulated")
        need(weight.shape[1] % 16 == 0 and weight.shape[2] % 32 == 0, "rows %16 and K %64")
        out.copy_(layouts.sm90_interleave(weight))

    def init(self, *options: Any) -> "_Runner":
        return _Runner(self, SimpleNamespace(**dict(zip(OPTIONS, options, strict=True))))


class _Runner:
    def __init__(self, module: CutlassEmulator, options: SimpleNamespace) -> None:
        self.module, self.options = module, options

    def run_moe(self, *values: Any) -> None:
        call = SimpleNamespace(**dict(zip(ARGUMENTS, values, strict=True)), options=self.options)
        self.module.calls.append(call)
        self.module.exact = _run(call)
        call.output.copy_(self.module.exact)


def _run(call: SimpleNamespace) -> torch.Tensor:
    _check(call)
    experts = _decode(call)
    if call.tp_rank != 0:
        experts.b2 = None
    x = call.input.float()
    if call.input.dtype == torch.float8_e4m3fn:
        x = x * call.scales[3]
    return experts.run(x, call.ids, call.weights, call.ep_rank * call.fc2.shape[0])


def emulate(arguments: dict[str, Any]) -> torch.Tensor:
    """fp32 result [T, H] of one call of the library's `cutlass_fused_moe`, from its keyword arguments on the CPU.

    Needs no library, so that it can stand beside the real one.
    """
    options = SimpleNamespace(
        x_dtype=arguments["input"].dtype, out_dtype=arguments["output_dtype"],
        fp8_block=arguments.get("use_deepseek_fp8_block_scale", False),
        w4_group=arguments.get("use_w4_group_scaling", False),
    )  # fmt: skip
    call = SimpleNamespace(
        **{name: arguments.get(keyword) for name, keyword in _KEYWORDS.items()},
        tp_rank=arguments["tp_rank"], ep_rank=arguments["ep_rank"], options=options,
    )  # fmt: skip
    return _run(call)


def _check(call: SimpleNamespace) -> None:
    need(call.input.dtype == call.options.x_dtype and call.input.dim() == 2, "input type or rank")
    need(call.ids.dtype == torch.int32 and call.ids.dim() == 2, "ids must be int32 [T, K]")
    need(call.weights.dtype == torch.float32 and call.weights.shape == call.ids.shape, "weights must be fp32 [T, K]")
    need(call.input.shape[0] == call.ids.shape[0] > 0, "tokens differ, or none (the kernel has no guard)")
    need((call.fc1_bias is None) == (call.fc2_bias is None), "one bias alone crashes")
    per_byte = {torch.uint8: 2, torch.int64: 16}.get(call.fc1.dtype, 1)
    hidden, inter = call.fc2.shape[1], call.fc2.shape[2] * per_byte
    need(call.fc1.shape[1] == 2 * inter, "fc1 rows must be twice the intermediate size")
    need(call.fc1.shape[2] * per_byte == hidden == call.input.shape[1], "hidden sizes differ")
    width = min(call.input.element_size(), call.fc1.element_size())
    need(hidden % (16 // width) == 0 and inter % (16 // width) == 0, "128-bit alignment")
    for tensor in (call.input, call.ids, call.weights, call.fc1, call.fc2, call.output):
        need(tensor.is_contiguous(), "contiguous tensors only")
    num_experts = call.fc2.shape[0]
    for bias, rows in ((call.fc1_bias, 2 * inter), (call.fc2_bias, hidden)):
        if bias is not None:
            need(bias.dtype == call.options.out_dtype and bias.shape == (num_experts, rows), "bias dtype or shape")
    for scalar in (call.alpha, call.beta, call.limit):
        if scalar is not None:
            need(scalar.dtype == torch.float32 and scalar.shape == (num_experts,), "swiglu tensors are fp32 [E]")


def _decode(call: SimpleNamespace) -> DenseExperts:
    options = call.options
    if options.fp8_block:
        experts = _fp8_block(call)
    elif options.w4_group:
        experts = _mxfp4(call)
    elif call.fc1.dtype == torch.int64:
        experts = _nvfp4(call)
    elif call.fc1.dtype == torch.float8_e4m3fn:
        experts = _fp8_tensor(call)
    else:
        need(call.fc1.dtype == call.fc2.dtype == torch.bfloat16 and not call.scales, "bf16 takes no scales")
        experts = DenseExperts(w13=call.fc1.float(), w2=call.fc2.float(), first_is_up=True)
    experts.b13, experts.b2 = call.fc1_bias, call.fc2_bias
    if any(scalar is not None for scalar in (call.alpha, call.beta, call.limit)):
        experts.alpha, experts.beta, experts.limit = call.alpha, call.beta, call.limit
    return experts


def _mxfp4(call: SimpleNamespace) -> DenseExperts:
    need(call.input.dtype == torch.bfloat16 and call.fc1.dtype == torch.uint8, "bf16 activations, u8 weights")
    need(len(call.scales) == 2, "expecting 2 quant scales for W4A16")
    dense = []
    for weight, scale in zip((call.fc1, call.fc2), call.scales, strict=True):
        need(scale.dtype == torch.int32 and scale.is_contiguous(), "scales are read as int32 words")
        rows, groups = weight.shape[1], weight.shape[2] // 16
        need(rows % 64 == 0 and groups % 4 == 0, "tiles of 64 rows and 128 columns")
        need(scale.numel() * 4 == weight.shape[0] * rows * groups, "size of the folded scales")
        dense.append(numbers.mxfp4(layouts.sm90_restore(weight), layouts.unfold_scales(scale, rows, groups)))
    return DenseExperts(w13=dense[0], w2=dense[1], first_is_up=True)


def _fp8_block(call: SimpleNamespace) -> DenseExperts:
    need(call.input.dtype == torch.bfloat16 and call.fc1.dtype == torch.float8_e4m3fn, "bf16 in, e4m3 weights")
    need(len(call.scales) == 2 and call.fc1_bias is None, "two scales, no bias")
    need(all(bool((scale >= 1e-10).all()) for scale in call.scales), "tiny scales give NaN on SM90")
    w13, w2 = map(numbers.fp8_block, (call.fc1, call.fc2), call.scales)
    experts = DenseExperts(w13=w13, w2=w2, first_is_up=True)
    experts.quantize_in = experts.quantize_mid = lambda x, expert: numbers.fake_fp8_groups(x)
    return experts


def _fp8_tensor(call: SimpleNamespace) -> DenseExperts:
    need(call.input.dtype == torch.float8_e4m3fn and len(call.scales) == 4, "quantized input, four scales")
    dequant1, quant2, dequant2, dequant_in = call.scales
    num_experts = call.fc2.shape[0]
    need(all(scale.dtype == torch.float32 for scale in call.scales), "fp32 scales")
    need(dequant1.shape == dequant2.shape == (num_experts,), "dequant scales are [E]")
    need(quant2.dim() == 0 or quant2.shape == (num_experts,), "fc2 quant is a scalar or [E]")
    need(dequant_in.dim() == 0, "input dequant is a scalar")
    per_expert = quant2.expand(num_experts)
    # the kernel multiplies raw products by the dequant scales: take its activations' share out of the weights again
    w13 = call.fc1.float() * (dequant1 / dequant_in)[:, None, None]
    w2 = call.fc2.float() * (dequant2 * per_expert)[:, None, None]
    return DenseExperts(
        w13=w13, w2=w2, first_is_up=True, quantize_mid=lambda mid, expert: numbers.fake_fp8(mid, per_expert[expert])
    )


def _nvfp4(call: SimpleNamespace) -> DenseExperts:
    need(len(call.scales) == 6, "expecting 6 quant scales for nvfp4")
    quant1, sf1, global1, quant2, sf2, global2 = call.scales
    num_experts, hidden, inter = call.fc2.shape[0], call.fc2.shape[1], call.fc2.shape[2] * 16
    need(quant1.dim() == 0 and quant2.dim() == 0, "one activation scale for all experts")
    need(sf1.shape == (num_experts, 2 * inter, hidden // 64) and sf1.dtype == torch.int32, "fc1 block scales")
    need(sf2.shape == (num_experts, hidden, inter // 64) and sf2.dtype == torch.int32, "fc2 block scales")
    need(global1.shape == global2.shape == (num_experts,), "alphas are [E]")
    dense = []
    for weight, scale, alpha, quant in ((call.fc1, sf1, global1, quant1), (call.fc2, sf2, global2, quant2)):
        codes = weight.view(torch.uint8)
        scales = layouts.unswizzle(scale.view(torch.uint8), codes.shape[1], codes.shape[2] // 8)
        dense.append(numbers.nvfp4(codes, scales) * (alpha * quant)[:, None, None])
    return DenseExperts(
        w13=dense[0], w2=dense[1], first_is_up=True,
        quantize_in=lambda x, expert: numbers.fake_nvfp4(x, quant1),
        quantize_mid=lambda mid, expert: numbers.fake_nvfp4(mid, quant2),
    )  # fmt: skip


def install_cutlass(monkeypatch: pytest.MonkeyPatch, major: int = 9, minor: int = 0) -> CutlassEmulator:
    """Replace the compiled cutlass module of `sm<major><minor>` until the test ends."""
    pretend_gpu(monkeypatch, major, minor)
    from flashinfer.fused_moe import core

    emulator = CutlassEmulator()
    monkeypatch.setattr(core, f"gen_cutlass_fused_moe_sm{major}{minor}_module", lambda fast: built(emulator))
    monkeypatch.setattr(core, "get_cutlass_fused_moe_module", uncached(core.get_cutlass_fused_moe_module))
    return emulator
