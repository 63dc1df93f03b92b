"""The compiled FP4 quantization module of FlashInfer: quantize, swizzle, and the masked grouped quantizers."""

import pytest
import torch

from tests.emulators import layouts, numbers
from tests.emulators.device import built, replace_everywhere, uncached
from tests.emulators.refusal import need


class Fp4Emulator:
    """Writes into the buffers the library's Python allocated; rows past a mask get NaN scales."""

    def __init__(self) -> None:
        # by address: fp32 values of bf16 results that other emulators made
        self.unrounded: dict[int, torch.Tensor] = {}

    def fp4_quantize(
        self, x: torch.Tensor, global_scale: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, vec: int,
        ue8m0: bool, swizzled: bool, is_8x4: bool, inversed: bool, pdl: bool, recipe: int,
    ) -> None:  # fmt: skip
        need((vec, ue8m0, is_8x4, inversed) == (16, False, False, False), "plain NVFP4 only")
        need(x.dtype == torch.bfloat16 and x.is_contiguous(), "contiguous bf16")
        need(global_scale.dtype == torch.float32 and global_scale.numel() == 1, "one fp32 scale")
        q, sf = numbers.quantize_nvfp4(x, global_scale.reshape(()))
        codes.copy_(q)
        flat = layouts.swizzle(sf.view(torch.uint8)[None])[0] if swizzled else sf.view(torch.uint8).flatten()
        scales[: flat.numel()] = flat

    def block_scale_interleave_sm100(self, scales: torch.Tensor, out: torch.Tensor) -> None:
        need(scales.dtype == torch.uint8, "bytes")
        matrices = scales if scales.dim() == 3 else scales[None]
        out.copy_(layouts.swizzle(matrices).flatten())

    def silu_and_mul_scaled_nvfp4_experts_quantize(
        self, codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor, global_scale: torch.Tensor,
        mask: torch.Tensor, with_silu: bool, recipe: int,
    ) -> None:  # fmt: skip
        num_experts = mask.numel()
        need(mask.dtype == torch.int32, "mask is int32")
        need(global_scale.dtype == torch.float32 and global_scale.shape == (num_experts,), "one input scale per expert")
        x = self.unrounded.get(x.data_ptr(), x).float().reshape(num_experts, -1, x.shape[-1])
        if with_silu:
            gate, up = x.chunk(2, dim=-1)
            x = gate / (1 + torch.exp(-gate)) * up
        num_rows, groups = x.shape[1], x.shape[2] // 16
        codes = codes.view(num_experts, num_rows, -1)
        flat_scales = scales.view(torch.uint8).view(num_experts, -1)
        flat_scales.fill_(0x7F)
        codes.fill_(0xFF)
        for expert, used in enumerate(mask.tolist()):
            codes[expert, :used], sf = numbers.quantize_nvfp4(x[expert, :used], global_scale[expert])
            position = layouts.swizzle_position(num_rows, groups)[:used]
            flat_scales[expert, position.flatten()] = sf.view(torch.uint8).flatten()


def install_fp4(monkeypatch: pytest.MonkeyPatch, arch: str = "100") -> Fp4Emulator:
    """Replace the compiled module; call `pretend_gpu` first."""
    from flashinfer.quantization import fp4_quantization

    emulator = Fp4Emulator()
    monkeypatch.setattr(fp4_quantization, f"gen_fp4_quantization_sm{arch}_module", lambda: built(emulator))
    cached = fp4_quantization.get_fp4_quantization_module
    replace_everywhere(monkeypatch, cached, uncached(cached))
    return emulator
