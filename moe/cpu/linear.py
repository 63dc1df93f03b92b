"""Linear layers that are fast on a CPU for few rows. Use them for any `x @ W.T + b`, not only for experts.

FBGEMM multiplies fp32 activations with weights packed as fp16, accumulating in fp32. At 1 to 16 rows that takes a
quarter to a tenth of the time of MKL's fp32 GEMM, and a row's result has the same bits in every batch, at every
position and with every thread count. Weights are packed only if fp16 holds them with fp32 accuracy: MXFP4 always, bf16
in the usual range. Shape letters: R rows, N outputs, K inputs.
"""

import functools
import warnings
from typing import Protocol

import torch

# Multiply-adds from which FBGEMM's threaded operator beats the single-threaded one, where torch has threads. Its call
# costs 8 to 40 us more.
_THREADED_FROM = 2**21
# Relative rounding error (over a whole matrix) below which fp16 counts as exact: that of fp32 itself.
_EXACT_BELOW = 2.0**-24
_ENGINES = ("x86", "fbgemm")
# Rows that FBGEMM multiplies in one go (its `mb_max`); it splits a larger batch after every so many.
_BLOCK_ROWS = 120


class Linear(Protocol):
    """A linear layer as a function of its input [R, K]."""

    def __call__(self, x_RK: torch.Tensor) -> torch.Tensor:
        """[R, N]."""

    def parts(self) -> list[torch.Tensor]:
        """Weight [N, K] and, if there is one, bias [N], from which `make_linear` makes the same function."""


def make_linear(weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> Linear:
    """The fastest exact form for this device and dtype; weight and bias share one dtype."""
    if _can_pack(weight_NK):
        return PackedLinear(weight_NK, bias_N)
    return DenseLinear(weight_NK, bias_N)


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.numel() == 0:
        return False
    if torch.backends.quantized.engine not in _ENGINES or not hasattr(torch, "fbgemm_pack_gemm_matrix_fp16"):
        return False
    rounding = torch.linalg.vector_norm(weight - weight.half().float())
    # Strictly below: both are infinite beyond fp16's range, and both 0 where squares underflow.
    return bool(rounding < _EXACT_BELOW * torch.linalg.vector_norm(weight)) or not bool(weight.any())


class PackedLinear:
    """Weights in fp16, packed twice: for the operator whose call is cheap, and for the threaded one with many rows."""

    __slots__ = ("_bias_N", "_few_rows", "_many_from", "_many_rows", "_padding")

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self._bias_N = bias_N
        self._few_rows = _pack_quietly(weight_NK)
        self._many_rows = torch.ops.quantized.linear_prepack_fp16(weight_NK, bias_N)
        self._many_from = -(-_THREADED_FROM // weight_NK.numel())
        self._padding = _padding_by_rows()

    def __call__(self, x_RK: torch.Tensor) -> torch.Tensor:
        """[R, N] in fp32. The bits of a row do not depend on the other rows."""
        num_rows = x_RK.shape[0]
        extra = 0 if self._padding is None else self._padding[num_rows % _BLOCK_ROWS]
        if extra:
            any_row_1K = x_RK if num_rows == 1 else x_RK[:1]
            x_RK = torch.cat([x_RK] + [any_row_1K] * extra)  # cheaper than `pad`
        if num_rows + extra < self._many_from or torch.get_num_threads() == 1:
            y_RN = torch.fbgemm_linear_fp16_weight_fp32_activation(x_RK, self._few_rows, self._bias_N)
        else:
            y_RN = torch.ops.quantized.linear_dynamic_fp16.default(x_RK, self._many_rows)
        return y_RN[:num_rows] if extra else y_RN

    def parts(self) -> list[torch.Tensor]:
        """Unpacked: fp32 of fp16 numbers, which pack to the same bits."""
        weight_NK, _ = torch.ops.quantized.linear_unpack_fp16(self._many_rows)
        return [weight_NK] if self._bias_N is None else [weight_NK, self._bias_N]


def _pack_quietly(weight_NK: torch.Tensor) -> torch.Tensor:
    """Pack for the low-overhead call, without the deprecation warning that torch gives once per process.

    The filter stays: `warnings.catch_warnings` replaces the filters of all threads.
    """
    warnings.filterwarnings("ignore", message="fbgemm_.* is deprecated")
    packed = torch.fbgemm_pack_gemm_matrix_fp16(weight_NK)
    torch.fbgemm_linear_fp16_weight_fp32_activation(weight_NK.new_zeros(1, weight_NK.shape[1]), packed, None)
    return packed


@functools.cache
def _padding_by_rows() -> list[int] | None:
    """For R % 120 the rows to add so that each row gets the bits that it has in every batch; None if that is always 0.

    FBGEMM splits a batch among kernels of one to six rows. On CPUs without AVX-512, those for one and two rows add up
    in another order than the others (seen with torch 2.13 on an AMD Zen 3), so no batch may end in them.
    """
    generator = torch.Generator().manual_seed(0)
    packed = _pack_quietly(torch.randn(16, 64, generator=generator))
    x_RK = torch.randn(_BLOCK_ROWS, 64, generator=generator)
    bias_N = torch.zeros(16)

    def multiply(num_rows: int) -> torch.Tensor:
        return torch.fbgemm_linear_fp16_weight_fp32_activation(x_RK[:num_rows], packed, bias_N)

    whole = multiply(_BLOCK_ROWS)
    padding = [0] * _BLOCK_ROWS
    for num_rows in range(_BLOCK_ROWS - 1, 0, -1):
        if not torch.equal(multiply(num_rows), whole[:num_rows]):
            padding[num_rows] = 1 + padding[(num_rows + 1) % _BLOCK_ROWS]
    return padding if any(padding) else None


class DenseLinear:
    """Unpacked weights in any dtype on any device. The last bits of a row may depend on its batch."""

    __slots__ = ("_bias_N", "_bias_N1", "_is_cpu_fp32", "_weight_NK")

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self._weight_NK = weight_NK
        self._bias_N = bias_N
        self._bias_N1 = None if bias_N is None else bias_N[:, None]
        self._is_cpu_fp32 = weight_NK.device.type == "cpu" and weight_NK.dtype == torch.float32

    def __call__(self, x_RK: torch.Tensor) -> torch.Tensor:
        """[R, N] in the weights' dtype."""
        if not self._is_cpu_fp32:
            return torch.nn.functional.linear(x_RK, self._weight_NK, self._bias_N)
        # MKL's fp32 GEMM is several times faster this way round, and as a GEMM of two columns than as a matrix-vector
        # product of one.
        num_rows = x_RK.shape[0]
        x_KR = (x_RK.repeat(2, 1) if num_rows == 1 else x_RK).t()
        if self._bias_N1 is None:
            y_NR = torch.mm(self._weight_NK, x_KR)
        else:
            y_NR = torch.addmm(self._bias_N1, self._weight_NK, x_KR)
        return y_NR.t()[:num_rows]

    def parts(self) -> list[torch.Tensor]:
        """As they are."""
        return [self._weight_NK] if self._bias_N is None else [self._weight_NK, self._bias_N]
