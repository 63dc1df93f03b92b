"""The compiled module behind the `trtllm_*_moe` functions (SM100): FP8 block, FP8 per tensor, NVFP4, MXFP4 x bf16.

The library: flashinfer-python 0.7.2.post1 (commit beabf50), whose Python around the module runs as it is.
Routes inside where logits are given, as the kernel does: bias rounded to bf16, weights given out in bf16.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.emulators import layouts, numbers
from tests.emulators.cutlass import words
from tests.emulators.device import built, pretend_gpu, replace_everywhere, uncached
from tests.emulators.experts import DenseExperts
from tests.emulators.fp4_module import install_fp4
from tests.emulators.refusal import need

FP4 = words(
    "mode logits topk_ids topk_weights routing_bias x x_scale w13 w13_scale b13 lora alpha beta limit w2 w2_scale "
    "b2 out1_scale out1_gate_scale out2_scale per_token num_experts top_k num_shared n_group topk_group inter "
    "offset num_local factor method finalize pdl activation output tactic norm_topk replay da_a da_b da_c "
    "valid_hidden valid_inter"
)
FP8_BLOCK = words(
    "mode logits topk_ids topk_weights routing_bias x x_scale w13 w13_scale lora b13 alpha beta limit w2 w2_scale "
    "b2 output num_experts top_k num_shared n_group topk_group inter offset num_local factor method shuffled "
    "layout finalize pdl tactic fp8_type activation norm_topk replay da_a da_b da_c valid_hidden valid_inter"
)
FP8_TENSOR = words(
    "logits routing_bias x w13 out1_scale out1_gate_scale w2 out2_scale output num_experts top_k n_group "
    "topk_group inter offset num_local factor weight_on_input method finalize pdl tactic activation norm_topk "
    "replay da_a da_b da_c limit"
)
FP8_TENSOR_ROUTED = ["mode", "topk_ids", "topk_weights", *FP8_TENSOR[1:]]  # ids and weights instead of logits


class TrtllmEmulator:
    """`calls` keeps every launch's arguments, `exact` the last fp32 result, `routed` its (ids, weights)."""

    def __init__(self) -> None:
        self.calls: list[SimpleNamespace] = []
        self.exact: torch.Tensor | None = None
        self.routed: tuple[torch.Tensor, torch.Tensor] | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("trtllm_"):
            raise AttributeError(name)
        return lambda *_: need(False, f"{name} is not emulated")

    def trtllm_fp4_block_scale_moe(self, *values: Any) -> list[torch.Tensor]:
        return self._launch(SimpleNamespace(kind="fp4", **dict(zip(FP4, values, strict=True))), _decode_fp4)

    def trtllm_fp8_block_scale_moe(self, *values: Any) -> list[torch.Tensor]:
        return self._launch(SimpleNamespace(kind="block", **dict(zip(FP8_BLOCK, values, strict=True))), _decode_block)

    def trtllm_fp8_per_tensor_scale_moe(self, *values: Any) -> list[torch.Tensor]:
        call = SimpleNamespace(kind="tensor", mode=0, topk_ids=None, **dict(zip(FP8_TENSOR, values, strict=True)))
        return self._launch(call, _decode_tensor)

    def trtllm_fp8_per_tensor_scale_routed_moe(self, *values: Any) -> list[torch.Tensor]:
        call = SimpleNamespace(kind="tensor", logits=None, **dict(zip(FP8_TENSOR_ROUTED, values, strict=True)))
        return self._launch(call, _decode_tensor)

    def _launch(
        self, call: SimpleNamespace, decode: Callable[[SimpleNamespace], tuple[torch.Tensor, DenseExperts]]
    ) -> list[torch.Tensor]:
        self.calls.append(call)
        need(call.output.dtype == torch.bfloat16 and call.output.is_contiguous(), "bf16 output")
        need(call.activation == 3 and call.finalize, "Swiglu, finalized")
        need(call.offset + call.num_local <= call.num_experts, "expert range")
        need(call.x.is_contiguous() and call.x.shape[0] > 0, "contiguous tokens")
        x, experts = decode(call)
        need(experts.w13.shape[0] == call.num_local, "local experts")
        need(experts.w13.shape[1] == 2 * call.inter == 2 * experts.w2.shape[2], "intermediate size")
        self.routed = ids, weights = _unpack(call) if call.mode == 1 else _route(call)
        need(bool(((ids >= 0) & (ids < call.num_experts)).all()), "expert ids in range")
        self.exact = experts.run(x, ids, weights, call.offset)
        call.output.copy_(self.exact)
        return []


def _unpack(call: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
    packed = call.topk_ids
    need(packed.dtype == torch.int32 and packed.shape == (call.x.shape[0], call.top_k), "packed routing")
    need(call.method == 5 and call.factor in (None, 1.0), "routed outside: method TopK, factor in the weights")
    return packed >> 16, (packed << 16).view(torch.float32)  # bf16 is the upper half of fp32


def _route(call: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
    need(call.logits.dtype in (torch.float32, torch.bfloat16), "routing_logits must be float or bfloat16")
    need(call.logits.shape == (call.x.shape[0], call.num_experts), "routing_logits shape")
    if call.kind == "tensor":
        need(call.logits.dtype == torch.bfloat16, "the per-tensor call takes bf16 logits")
        need(call.routing_bias is None or call.routing_bias.dtype == torch.bfloat16, "and a bf16 bias")
    logits = call.logits.float()
    factor = 1.0 if call.factor is None else call.factor
    if call.method == 1:
        need(not call.n_group or call.n_group <= 1, "groups need DeepSeekV3 routing")
        values, ids = logits.topk(call.top_k, dim=-1)
        weights = torch.softmax(values, -1) * factor
    else:
        need(call.method == 2, "Renormalize or DeepSeekV3")
        ids, weights = _deepseek(call, logits, factor)
    return ids, weights.bfloat16().float()


def _deepseek(call: SimpleNamespace, logits: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    need(bool(call.n_group) and bool(call.topk_group), "n_group and topk_group must not be zero")
    need(call.num_experts % call.n_group == 0 and call.num_experts % 4 == 0 and call.topk_group <= 4, "group limits")
    need(call.top_k < call.topk_group * call.num_experts // call.n_group, "top_k below the kept experts")
    scores = torch.sigmoid(logits)
    choice = scores + call.routing_bias.bfloat16().float()
    groups = choice.unflatten(-1, (call.n_group, -1))
    kept = groups.topk(2, dim=-1).values.sum(-1).topk(call.topk_group, dim=-1).indices
    mask = torch.zeros(groups.shape[:2]).scatter(1, kept, 1.0).bool()
    ids = groups.masked_fill(~mask[..., None], -torch.inf).flatten(1).topk(call.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    return ids, weights / weights.sum(-1, keepdim=True) * factor


def _scaled(call: SimpleNamespace, w13: torch.Tensor, w2: torch.Tensor) -> DenseExperts:
    """Kernel scalars folded in: up carries the next quantizer's factor, gate only its own."""
    if call.out1_scale is not None:
        for scale in (call.out1_scale, call.out1_gate_scale, call.out2_scale):
            need(scale.dtype == torch.float32 and scale.shape == (call.num_local,), "output scales are fp32 [E]")
        up, gate = w13.chunk(2, dim=1)
        w13 = torch.cat((up * call.out1_scale[:, None, None], gate * call.out1_gate_scale[:, None, None]), dim=1)
        w2 = w2 * call.out2_scale[:, None, None]
    return DenseExperts(w13=w13, w2=w2, first_is_up=True)


def _decode_fp4(call: SimpleNamespace) -> tuple[torch.Tensor, DenseExperts]:
    is_mx = call.x_scale is None
    group = 32 if is_mx else 16
    dense = []
    for weight, scale, gated in ((call.w13, call.w13_scale, True), (call.w2, call.w2_scale, False)):
        need(weight.dtype == torch.uint8 and scale.dtype == torch.float8_e4m3fn, "u8 codes, e4m3-typed scales")
        rows, groups = weight.shape[1], weight.shape[2] * 2 // group
        need(scale.shape == (weight.shape[0], rows, groups) and scale.is_contiguous(), "one scale per group")
        need(rows % 128 == 0 and groups % 4 == 0, "swizzle blocks")
        octets = layouts.unswizzle(scale.view(torch.uint8), rows, groups)
        decode = numbers.mxfp4 if is_mx else numbers.nvfp4
        dense.append(layouts.unshuffle(decode(weight, octets), gated=gated))
    need(call.inter % 128 == 0, "the second dimension of weights must be a multiple of 128")
    experts = _scaled(call, dense[0], dense[1])
    if is_mx:
        need(call.x.dtype == torch.bfloat16 and call.out1_scale is None, "bf16 activations take no scalars")
    else:
        need(call.x.dtype == torch.uint8 and call.x_scale.dtype == torch.float8_e4m3fn, "packed activations")
        need(call.x_scale.shape == (call.x.shape[0], call.x.shape[1] // 8), "linear activation scales")
        experts.quantize_mid = lambda mid, expert: numbers.fake_nvfp4(mid, 1.0)
    for bias, gated in ((call.b13, True), (call.b2, False)):
        if bias is not None:
            need(bias.dtype == torch.float32 and bias.is_contiguous(), "biases are fp32")
            setattr(experts, "b13" if gated else "b2", layouts.unshuffle(bias, gated=gated))
    experts.alpha, experts.beta, experts.limit = call.alpha, call.beta, call.limit
    return call.x.float() if is_mx else numbers.nvfp4(call.x, call.x_scale), experts


def _decode_block(call: SimpleNamespace) -> tuple[torch.Tensor, DenseExperts]:
    need(not call.shuffled and call.layout == 0 and int(call.fp8_type) == 1, "DeepSeekFp8, MajorK, not shuffled")
    need(call.x.dtype == call.w13.dtype == call.w2.dtype == torch.float8_e4m3fn, "e4m3 everywhere")
    need(call.x_scale.shape == (call.x.shape[1] // 128, call.x.shape[0]), "activation scales are [K/128, T]")
    need(call.x_scale.dtype == torch.float32 and call.x_scale.is_contiguous(), "fp32 activation scales")
    w13, w2 = numbers.fp8_block(call.w13, call.w13_scale), numbers.fp8_block(call.w2, call.w2_scale)
    experts = DenseExperts(w13=w13, w2=w2, first_is_up=True)
    experts.quantize_mid = lambda mid, expert: numbers.fake_fp8_groups(mid)
    return call.x.float() * call.x_scale.T.repeat_interleave(128, dim=1), experts


def _decode_tensor(call: SimpleNamespace) -> tuple[torch.Tensor, DenseExperts]:
    need(call.x.dtype == call.w13.dtype == call.w2.dtype == torch.float8_e4m3fn, "e4m3 everywhere")
    need(not call.weight_on_input and call.limit is None, "weights multiply the output; plain SwiGLU")
    w13 = layouts.unshuffle(call.w13.float(), gated=True)
    experts = _scaled(call, w13, layouts.unshuffle(call.w2.float(), gated=False))
    experts.quantize_mid = lambda mid, expert: numbers.fake_fp8(mid, 1.0)
    return call.x.float(), experts


def install_trtllm(monkeypatch: pytest.MonkeyPatch, major: int = 10, minor: int = 0) -> TrtllmEmulator:
    """Replace the compiled TRT-LLM and FP4 modules until the test ends."""
    pretend_gpu(monkeypatch, major, minor)
    install_fp4(monkeypatch, f"{major}{minor}")
    from flashinfer.fused_moe import core

    emulator = TrtllmEmulator()
    monkeypatch.setattr(core, "gen_trtllm_gen_fused_moe_sm100_module", lambda enable_rubin: built(emulator))
    cached = core._get_trtllm_moe_sm100_module_impl
    replace_everywhere(monkeypatch, cached, uncached(cached))
    return emulator
