"""Dense linear layers, and the one rule for the fastest form of a small matrix product on a CPU.

Measured on two AVX-512 cores in fp32 (microseconds at 1, 2, 4, 8, 64 rows):
    288 -> 768    F.linear 21, 38, 47, 49, 178    W @ x.T 23, 26, 32, 89, 153
    288 -> 4096   F.linear 114, 227, 234, 239, 948    W @ x.T 116, 115, 149, 285, 794
So two to five rows use `W @ x.T`, everything else `F.linear`; bf16 and GPUs always `F.linear`.

Shape letters: T tokens, K inputs, N outputs.
"""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

_MAX_TRANSPOSED_ROWS = 5


class Linear(nn.Module):
    """`x @ weight.T + bias`, built from loaded tensors."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_NK.contiguous(), requires_grad=False)
        self.bias = None if bias_N is None else nn.Parameter(bias_N.contiguous(), requires_grad=False)
        self._is_cpu_fp32 = weight_NK.dtype == torch.float32 and weight_NK.device.type == "cpu"

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        """[T, K] to [T, N], row-major."""
        if self._is_cpu_fp32 and 1 < x_TK.shape[0] <= _MAX_TRANSPOSED_ROWS:
            return few_rows(x_TK, self.weight, self.bias)
        return F.linear(x_TK, self.weight, self.bias)


def few_rows(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """The same product in the form that keeps the large matrix on the left."""
    x_KT = x_TK.t()
    y_NT = weight_NK @ x_KT if bias_N is None else torch.addmm(bias_N[:, None], weight_NK, x_KT)
    return y_NT.t().contiguous()


class GatedMlp(nn.Module):
    """Dense SwiGLU block of DeepSeek-V3: `down(silu(gate(x)) * up(x))`, gate and up in one matrix."""

    def __init__(self, gate_IH: torch.Tensor, up_IH: torch.Tensor, down_HI: torch.Tensor) -> None:
        super().__init__()
        self.gate_up = Linear(torch.cat((gate_IH, up_IH)))
        self.down = Linear(down_HI)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] to [T, H]."""
        gate_TI, up_TI = self.gate_up(x_TH).chunk(2, dim=-1)
        return self.down(F.silu(gate_TI) * up_TI)
