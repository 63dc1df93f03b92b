"""The compiled functions behind FlashInfer's CuTe-DSL experts: the masked grouped GEMM (v1) and the fused core (v2).

The library: flashinfer-python 0.7.2.post1 (commit beabf50), whose Python around them runs as it is.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.emulators import layouts, numbers
from tests.emulators.device import pretend_gpu, replace_everywhere
from tests.emulators.experts import DenseExperts
from tests.emulators.fp4_module import Fp4Emulator, install_fp4
from tests.emulators.refusal import need

NUM_SMS = 148


class CutedslEmulator:
    """`gemms` keeps v1's launches, `calls` v2's; `exact` is the last fp32 result."""

    def __init__(self, fp4: Fp4Emulator) -> None:
        self.fp4 = fp4
        self.gemms: list[SimpleNamespace] = []
        self.calls: list[SimpleNamespace] = []
        self.exact: torch.Tensor | None = None

    def compiled_masked_gemm(self, **shape: Any) -> Any:
        """What the library 'compiles' for one problem."""
        problem = SimpleNamespace(**shape)
        need((problem.a_major, problem.b_major, problem.c_major) == ("k", "k", "n"), "row-major operands")
        need(problem.sf_vec_size == 16 and problem.alpha_dtype is not None, "NVFP4 with alphas")
        return lambda **tensors: self._masked_gemm(problem, SimpleNamespace(**tensors))

    def _masked_gemm(self, problem: SimpleNamespace, call: SimpleNamespace) -> torch.Tensor:
        self.gemms.append(SimpleNamespace(**vars(problem), **vars(call)))
        m, n, k, num_experts = problem.m, problem.n, problem.k, problem.l
        need(m % 128 == 0 and k % 64 == 0 and n % 16 == 0, "tiles")
        alpha, masked_m = call.alpha_tensor_gpu, call.masked_m_tensor_gpu
        need(alpha.dtype == torch.float32 and alpha.numel() == num_experts, "one alpha per expert")
        need(masked_m.dtype == torch.int32 and masked_m.shape == (num_experts,), "masked_m int32 [E]")
        out = call.c_tensor_gpu
        need(out.dtype == torch.bfloat16 and out.shape == (m, n, num_experts), "output (m, n, e)")
        lhs = _operand(call.a_tensor_gpu, call.sfa_tensor_gpu, m, k)
        rhs = _operand(call.b_tensor_gpu, call.sfb_tensor_gpu, n, k)
        self.exact = torch.full((num_experts, m, n), float("nan"))
        for expert in range(num_experts):
            used = int(masked_m[expert])
            self.exact[expert, :used] = alpha.flatten()[expert] * (lhs[expert, :used] @ rhs[expert].T)
            out[:used, :, expert] = self.exact[expert, :used].bfloat16()
            out[used:, :, expert] = float("nan")
        self.fp4.unrounded[out.data_ptr()] = self.exact  # so that only the layouts are compared, not this rounding
        return out

    def fused_core(self, **values: Any) -> torch.Tensor:
        """The wrapper's whole forward pass."""
        call = SimpleNamespace(**values)
        self.calls.append(call)
        num_local, num_rows, hidden = call.w1_weight.shape[0], call.w1_weight.shape[1], call.w1_weight.shape[2] * 2
        need(call.x.dtype == torch.uint8 and call.x.is_contiguous() and call.x.shape[1] * 2 == hidden, "packed tokens")
        need(call.x_sf.shape == (call.x.shape[0], hidden // 16), "linear activation scales")
        ids, weights = call.token_selected_experts, call.token_final_scales
        need(ids.dtype == torch.int32 and weights.dtype == torch.float32, "int32 ids, fp32 weights")
        need(bool(((ids >= 0) & (ids < call.num_experts)).all()), "expert ids in range")
        need(call.fc2_input_scale.numel() == 1 and call.fc2_input_scale.dtype == torch.float32, "one fc2 input scale")
        for alpha in (call.w1_alpha, call.w2_alpha):
            need(alpha.shape == (num_local,) and alpha.dtype == torch.float32, "alphas are fp32 [E]")
        w13 = _weight(call.w1_weight, call.w1_weight_sf)
        w2 = _weight(call.w2_weight, call.w2_weight_sf)
        need(w13.shape[1] == 2 * w2.shape[2] == num_rows and num_rows % 128 == 0, "intermediate sizes")
        experts = DenseExperts(
            w13=layouts.deinterleave(w13) * call.w1_alpha[:, None, None],
            w2=w2 * (call.w2_alpha * call.fc2_input_scale)[:, None, None],
            first_is_up=True,
            quantize_mid=lambda mid, expert: numbers.fake_nvfp4(mid, call.fc2_input_scale),
        )
        x = numbers.nvfp4(call.x, call.x_sf.view(torch.uint8))
        self.exact = experts.run(x, ids, weights, call.local_expert_offset)
        call.moe_output.copy_(self.exact)
        return call.moe_output


def _operand(codes: torch.Tensor, scale: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """(rows, cols/2, E) codes and (32, 4, rows/128, 4, cols/64, E) scales to fp32 [E, rows, cols]."""
    need(codes.shape[:2] == (rows, cols // 2), "packed codes (m, k/2, e)")
    return _weight(codes.permute(2, 0, 1), scale)  # experts outermost, k innermost


def _weight(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[E, rows, cols/2] codes with an MMA scale view to fp32 [E, rows, cols]."""
    need(codes.dtype == torch.uint8 and codes.is_contiguous(), "contiguous codes")
    num_experts, rows, cols = codes.shape[0], codes.shape[1], codes.shape[2] * 2
    _check_scale_view(scale, num_experts, rows, cols)
    return numbers.nvfp4(codes, layouts.unview_mma(scale.view(torch.uint8), rows, cols // 16))


def _check_scale_view(scale: torch.Tensor, num_experts: int, rows: int, cols: int) -> None:
    row_blocks, col_blocks = (rows + 127) // 128, (cols // 16 + 3) // 4
    need(scale.element_size() == 1, "one byte per scale")
    need(scale.shape == (32, 4, row_blocks, 4, col_blocks, num_experts), "scale view (32, 4, m/128, 4, k/64, e)")
    # the strides of dimensions of size 1 carry no meaning
    wanted = (16, 4, 512 * col_blocks, 1, 512, 512 * col_blocks * row_blocks)
    matches = (size == 1 or have == want for size, have, want in zip(scale.shape, scale.stride(), wanted, strict=True))
    need(all(matches), "scale strides of the swizzled layout: a contiguous copy of the view is another layout")


def install_cutedsl(monkeypatch: pytest.MonkeyPatch) -> CutedslEmulator:
    """Replace the compiled kernels on SM100 until the test ends."""
    pretend_gpu(monkeypatch, 10, 0)
    from flashinfer.cute_dsl import utils
    from flashinfer.fused_moe.cute_dsl import fused_moe
    from flashinfer.gemm.kernels import grouped_gemm_masked_blackwell

    emulator = CutedslEmulator(install_fp4(monkeypatch, "100"))
    replace_everywhere(monkeypatch, utils.get_num_sm, lambda device: NUM_SMS)
    monkeypatch.setattr(
        grouped_gemm_masked_blackwell, "get_cute_dsl_compiled_masked_gemm_kernel", emulator.compiled_masked_gemm
    )
    monkeypatch.setattr(fused_moe, "_moe_core_impl", emulator.fused_core)
    return emulator
