"""Linear layers of the CPU: packed where that is exact, plain elsewhere, right in every form."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe.cpu.linear import DenseLinear, Linear, PackedLinear, make_linear
from moe.formats import Fp8BlockWeight, Mxfp4Weight
from tests.moe.moe_layers import HAS_FBGEMM
from tests.tables import rows


def dense(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@rows("kind", *[PackedLinear, DenseLinear] if HAS_FBGEMM else [DenseLinear])
@rows("num_rows", 1, 2, 3, 16, 40, 300)
@rows("with_bias", True, False)
def test_every_form_multiplies(kind: Callable[..., Linear], num_rows: int, with_bias: bool) -> None:
    weight, x = dense(97, 160).half().float(), dense(num_rows, 160, seed=2)
    bias = dense(97, seed=1) if with_bias else None
    got = kind(weight, bias)(x)
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert got.shape == (num_rows, 97)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@rows("dtype", torch.bfloat16, torch.float64)
def test_other_dtypes_stay_as_they_are(dtype: torch.dtype) -> None:
    linear = make_linear(dense(8, 16).to(dtype), dense(8).to(dtype))
    assert isinstance(linear, DenseLinear)
    assert linear(dense(3, 16).to(dtype)).dtype == dtype


def test_only_what_fp16_holds_exactly_is_packed() -> None:
    for weight, is_packed in [
        (Mxfp4Weight.quantize(dense(64, 96) * 0.02).dequantize(), True),
        (dense(64, 96).bfloat16().float() * 2**-5, True),
        (dense(64, 96), False),
        (Fp8BlockWeight.quantize(dense(64, 96)).dequantize(), False),
        (torch.full((4, 4), 1e6), False),
        (torch.full((4, 4), 2.0**-30), False),
        (torch.full((4, 4), 2.0**-100), False),
        (torch.eye(4) * 1e30, False),
        (torch.full((4, 4), float("inf")), False),
        (torch.full((4, 4), float("nan")), False),
        (torch.zeros(4, 4), True),
        (torch.zeros(0, 4), False),
        (torch.zeros(4, 0), False),
    ]:
        assert isinstance(make_linear(weight, None), PackedLinear) == (is_packed and HAS_FBGEMM), (weight, is_packed)


@rows("missing", "engine", "operator")
def test_without_fbgemm_weights_stay_dense(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "operator":
        monkeypatch.delattr(torch, "fbgemm_pack_gemm_matrix_fp16")
    else:
        monkeypatch.setattr("moe.cpu.linear._ENGINES", ())
    assert isinstance(make_linear(torch.ones(4, 4), None), DenseLinear)


@rows("shape, num_rows", ((0, 8), 3), ((8, 0), 1), ((8, 0), 3))
def test_empty_matrices_work(shape: tuple[int, int], num_rows: int) -> None:
    bias = torch.arange(shape[0], dtype=torch.float32)
    got = make_linear(torch.empty(shape), bias)(torch.empty(num_rows, shape[1]))
    assert torch.equal(got, bias.expand(num_rows, -1))


@rows("shape", *[(288, 96), (24, 2880), (97, 33)] if HAS_FBGEMM else [])
@rows("num_threads", 1, 2)
def test_a_row_has_the_same_bits_in_every_batch_and_in_both_operators(
    shape: tuple[int, int], num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two threads, 31 rows of (24, 2880) and 76 of (288, 96) are enough for the threaded operator."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    linear = PackedLinear(dense(*shape).half().float(), dense(shape[0], seed=1))
    x = dense(240, shape[1], seed=2)  # two whole blocks of FBGEMM, which need no padding
    few = torch.fbgemm_linear_fp16_weight_fp32_activation(x, linear._few_rows, linear._bias_N)
    assert torch.equal(torch.ops.quantized.linear_dynamic_fp16(x, linear._many_rows), few)
    for length in range(1, 151):
        rows_of_x = slice(length % 90, length % 90 + length)
        assert torch.equal(linear(x[rows_of_x]), few[rows_of_x]), rows_of_x


@pytest.mark.skipif(not HAS_FBGEMM, reason="this CPU packs nothing")
def test_rows_are_padded_as_the_cpu_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every batch that is not a whole number of FBGEMM's blocks had to be filled up to one."""
    multiply, num_multiplied = torch.fbgemm_linear_fp16_weight_fp32_activation, []

    def counting(x: torch.Tensor, *weights: Any) -> torch.Tensor:
        num_multiplied.append(x.shape[0])
        return multiply(x, *weights)

    monkeypatch.setattr("moe.cpu.linear._padding_by_rows", lambda: [0, *range(119, 0, -1)])
    linear = PackedLinear(dense(24, 32).half().float(), None)
    monkeypatch.setattr(torch, "fbgemm_linear_fp16_weight_fp32_activation", counting)
    x = dense(240, 32, seed=2)
    whole = linear(x)
    for length in (1, 2, 119, 120, 121, 239):
        assert torch.equal(linear(x[-length:]), whole[-length:])
    assert num_multiplied == [240, 120, 120, 120, 120, 240, 240]


def test_packing_lets_no_warning_out_and_hides_no_other() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_linear(torch.ones(4, 4), None)(torch.ones(1, 4))
        warnings.warn("another", stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["another"]
