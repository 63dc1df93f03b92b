"""Dense linear layers. How a matrix product is best done on a CPU is known in one place, `moe.cpu.linear`.

There, fp32 weights that fp16 holds exactly (bf16 checkpoints) are packed for FBGEMM, which beats MKL two to six times
at 1 to 16 rows; others multiply as `W @ x.T`. On GPUs, FP8 blocks stay FP8 (`fp8_linear.py`),
1 to 16 rows of bf16 by `few_rows.py`, and the rest is `F.linear`.

Shape letters: T tokens, K inputs, N outputs, I intermediate.
"""

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch.nn import functional as F

from model.fused import few_rows_kernel
from model.layer import Layer
from moe.cpu.linear import make_linear
from moe.formats import Fp8BlockWeight
from moe.formats.fp8_block import BLOCK
from moe.group import SINGLE_RANK, Group, PartialSum, SumPlace

LinearWeight = torch.Tensor | Fp8BlockWeight
"""[N, K]: dense in the model's dtype, or FP8 blocks, which only GPUs multiply."""


class Linear(Layer):
    """`x @ weight.T + bias`, built from loaded tensors; keeps them only in the form that is multiplied.

    `gates`: the rows are [gate; up], and where the kernel can (`is_gated`) the output is `silu(gate) * up`, [T, N/2].
    """

    _multiply: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self, weight_NK: LinearWeight, bias_N: torch.Tensor | None = None, *, gates: bool = False) -> None:
        super().__init__()
        self._few_rows: ModuleType | None = None
        self._fp8: Callable[..., torch.Tensor] | None = None
        self.is_gated = False
        if isinstance(weight_NK, Fp8BlockWeight):
            from model.fp8_linear import Fp8Linear, can_gate  # needs Triton

            self.is_gated = gates and can_gate(weight_NK)
            self._fp8 = Fp8Linear(weight_NK, bias_N, is_gated=self.is_gated)
        else:
            weight_NK = weight_NK.contiguous()
            self._multiply = make_linear(weight_NK, bias_N)
            self._few_rows = few_rows_kernel(weight_NK)
            if self._few_rows is not None:
                self._weight_NK, self._bias_N = weight_NK, bias_N

    @property
    def can_write(self) -> bool:
        """Whether `forward` writes to the memory that it is given."""
        return self._few_rows is not None or self._fp8 is not None

    def has_kernel_for(self, num_tokens: int) -> bool:
        """Whether the kernel for few rows multiplies so many tokens; it also writes fp32 to the memory it is given."""
        return self._few_rows is not None and num_tokens <= self._few_rows.MAX_ROWS

    def forward(self, x_TK: torch.Tensor, out_TN: torch.Tensor | None = None) -> torch.Tensor:
        """[T, K] to [T, N], row-major. If `can_write` and `out` is given, also row-major, it is the result."""
        if self._few_rows is not None:
            if self.has_kernel_for(x_TK.shape[0]) and x_TK.stride(1) == 1:
                product_TN: torch.Tensor = self._few_rows.linear(x_TK, self._weight_NK, self._bias_N, out_TN)
                return product_TN
            if out_TN is not None and self._bias_N is None:
                return torch.mm(x_TK, self._weight_NK.t(), out=out_TN)
            if out_TN is not None and self._bias_N is not None:
                return torch.addmm(self._bias_N, x_TK, self._weight_NK.t(), out=out_TN)
        if self._fp8 is not None:
            return self._fp8(x_TK, out_TN=out_TN)
        return self._multiply(x_TK).contiguous()


class RowParallelLinear(Layer):
    """A linear layer of which this rank has some columns of the weight, and the ranks of `group` the others."""

    def __init__(
        self, weight_NK: LinearWeight, bias_N: torch.Tensor | None = None, *, group: Group, place: SumPlace
    ) -> None:
        super().__init__()
        self.linear = Linear(weight_NK, bias_N)
        self._num_outputs = weight_NK.shape[0]
        self._group, self._place = group, place

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor | PartialSum:
        """[T, K] to a part of [T, N], or to all of it on a rank that is alone."""
        if self._group.size == 1:
            whole_TN: torch.Tensor = self.linear(x_TK)
            return whole_TN
        out_TN = None
        if self.linear.can_write:
            shape = (x_TK.shape[0], self._num_outputs)
            out_TN = self._group.empty(shape, x_TK.dtype, x_TK.device, self._place)
        return PartialSum(self.linear(x_TK, out_TN), self._group, self._place)


class GatedMlp(Layer):
    """Dense SwiGLU block of DeepSeek-V3: `down(silu(gate(x)) * up(x))`, gate and up in one matrix.

    `sums_over`: the ranks that have the rest of I; without them a part of the sum is returned as if it were all.
    """

    def __init__(
        self, gate_IH: LinearWeight, up_IH: LinearWeight, down_HI: LinearWeight, *, sums_over: Group = SINGLE_RANK
    ) -> None:
        super().__init__()
        self.gate_up = Linear(join_rows((gate_IH, up_IH)), gates=True)
        self.down = RowParallelLinear(down_HI, group=sums_over, place=SumPlace.MLP)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor | PartialSum:
        """[T, H] to [T, H]."""
        hidden_TI: torch.Tensor = self.gate_up(x_TH)
        if not self.gate_up.is_gated:
            gate_TI, up_TI = hidden_TI.chunk(2, dim=-1)
            hidden_TI = F.silu(gate_TI) * up_TI
        out_TH: torch.Tensor | PartialSum = self.down(hidden_TI)
        return out_TH


def join_rows(parts: Sequence[LinearWeight]) -> LinearWeight:
    """One weight with the rows of all parts: FP8 if all are and each but the last ends with a block, else dense."""
    blocks = [part for part in parts if isinstance(part, Fp8BlockWeight)]
    if len(blocks) == len(parts) and not any(part.shape[0] % BLOCK for part in blocks[:-1]):
        codes = torch.cat([part.data.view(torch.uint8) for part in blocks])
        return Fp8BlockWeight(codes.view(torch.float8_e4m3fn), torch.cat([part.scale_inv for part in blocks]))
    dtype = next((part.dtype for part in parts if isinstance(part, torch.Tensor)), torch.bfloat16)
    return torch.cat([part.dequantize(dtype) if isinstance(part, Fp8BlockWeight) else part for part in parts])
