"""Dense linear layers. How a matrix product is best done on a CPU is known in one place, `moe.cpu.linear`.

There, fp32 weights that fp16 holds exactly (bf16 checkpoints) are packed for FBGEMM, which beats MKL two to six times
at 1 to 16 rows; others multiply as `W @ x.T`. On GPUs and in bf16 it is `F.linear`, for 1 to 16 rows `few_rows`.

Shape letters: T tokens, K inputs, N outputs, I intermediate.
"""

import torch
from torch import nn
from torch.nn import functional as F

from model.fused import few_rows_kernel
from moe.cpu.linear import make_linear


class Linear(nn.Module):
    """`x @ weight.T + bias`, built from loaded tensors; keeps them only in the form that is multiplied."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> None:
        super().__init__()
        weight_NK = weight_NK.contiguous()
        self._multiply = make_linear(weight_NK, bias_N)
        self._few_rows = few_rows_kernel(weight_NK)
        self._weight_NK = weight_NK if self._few_rows else None
        self._bias_N = bias_N if self._few_rows else None

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        """[T, K] to [T, N], row-major."""
        if self._few_rows is not None and x_TK.shape[0] <= self._few_rows.MAX_ROWS and x_TK.stride(1) == 1:
            out_TN: torch.Tensor = self._few_rows.linear(x_TK, self._weight_NK, self._bias_N)
            return out_TN
        return self._multiply(x_TK).contiguous()


class GatedMlp(nn.Module):
    """Dense SwiGLU block of DeepSeek-V3: `down(silu(gate(x)) * up(x))`, gate and up in one matrix."""

    def __init__(self, gate_IH: torch.Tensor, up_IH: torch.Tensor, down_HI: torch.Tensor) -> None:
        super().__init__()
        self.gate_up = Linear(torch.cat((gate_IH, up_IH)))
        self.down = Linear(down_HI)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] to [T, H]."""
        gate_TI, up_TI = self.gate_up(x_TH).chunk(2, dim=-1)
        out_TH: torch.Tensor = self.down(F.silu(gate_TI) * up_TI)
        return out_TH
