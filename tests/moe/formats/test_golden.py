"""Golden bytes and values of every number format: what a checkpoint's bytes mean, and how values are rounded."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe.formats import Fp8BlockWeight, Fp8TensorWeight, Mxfp4Weight, Nvfp4Weight
from moe.formats.activation_quant import (
    ActivationQuant,
    fp8_groups,
    fp8_static,
    fp8_tokens,
    mxfp4_groups,
    nvfp4_static,
)
from moe.formats.fp4 import decode_e2m1, encode_e2m1
from moe.formats.fp8 import E4M3, to_e4m3
from moe.formats.mxfp4 import ScaleRule, e8m0_to_float, mx_exponents
from tests.tables import rows

CODES = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def codes(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def test_low_nibble_is_the_even_element_and_zero_keeps_its_sign() -> None:
    decoded = decode_e2m1(CODES)
    assert torch.equal(decoded, VALUES)
    assert torch.signbit(decoded).tolist() == [False] * 8 + [True] * 8
    assert torch.equal(encode_e2m1(VALUES), CODES)


@rows("sign", 1, -1)
@rows(
    "value, rounded",
    (0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5.0, 4), (0.26, 0.5), (5.01, 6), (1e9, 6),
)  # fmt: skip
def test_e2m1_ties_go_to_the_even_code_and_large_values_saturate(sign: int, value: float, rounded: float) -> None:
    assert decode_e2m1(encode_e2m1(torch.tensor([sign * value, 0.0])))[0] == sign * rounded


@rows("scale, second, last", (127, 0.5, -6.0), (125, 0.125, -1.5), (118, 0.0009765625, -0.01171875))
def test_mxfp4_bytes(scale: int, second: float, last: float) -> None:
    weight = Mxfp4Weight(CODES.repeat(2)[None], torch.tensor([[scale]], dtype=torch.uint8))
    dense = weight.dequantize()[0]
    assert dense[1] == second
    assert dense[-1] == last
    assert torch.equal(dense[:16], VALUES * 2.0 ** (scale - 127))


def test_e8m0_bytes() -> None:
    values = e8m0_to_float(torch.tensor([127, 126, 0, 254, 255], dtype=torch.uint8))
    assert values[:4].tolist() == [1.0, 0.5, 2.0**-127, 2.0**127]
    assert values[4].isnan()


@rows(
    "rule, expected",
    (ScaleRule.CEIL, [127, 128, 128, 127]),
    (ScaleRule.FLOOR, [127, 127, 127, 126]),
    (ScaleRule.EVEN, [127, 127, 128, 126]),
)
def test_mx_scale_rules(rule: ScaleRule, expected: list[int]) -> None:
    amax = torch.tensor([6.0, 6.5, 7.0, 3.4])
    assert (mx_exponents(amax, rule) + 127).tolist() == expected
    block = torch.zeros(4, 32)
    block[:, 5] = amax
    assert Mxfp4Weight.quantize(block, rule).scales.flatten().tolist() == expected


def test_mx_scale_stays_in_the_byte_for_extreme_blocks() -> None:
    amax = torch.tensor([0.0, 1e-45, 2.0**-126, 3e38])
    for rule in ScaleRule:
        exponents = mx_exponents(amax, rule)
        assert exponents[0] == -127
        assert int(exponents.min()) >= -127
        assert int(exponents.max()) <= 127


def test_e4m3_bytes() -> None:
    raw = torch.tensor([0x01, 0x07, 0x08, 0x38, 0x40, 0x77, 0x7E], dtype=torch.uint8)
    assert raw.view(E4M3).float().tolist() == [2**-9, 0.013671875, 2**-6, 1, 2, 240, 448]


@rows(
    "value, rounded",
    (17, 16), (19, 20), (2**-10, 0), (3 * 2**-10, 2**-8), (464, 448), (1e4, 448), (float("inf"), 448), (-1e9, -448),
)  # fmt: skip
def test_e4m3_rounding_clamps_before_the_cast(value: float, rounded: float) -> None:
    assert to_e4m3(torch.tensor([value])).float().item() == rounded


class CastToNan(TorchDispatchMode):
    """A device whose cast to E4M3 makes NaN of what is out of range, where a CPU saturates by itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten._to_copy.default or out.dtype != E4M3:
            return out
        return out.view(torch.uint8).masked_fill(args[0].abs() > 448, 0x7F).view(E4M3)


def test_values_out_of_range_saturate_where_the_cast_makes_nan() -> None:
    values = torch.tensor([449.0, -449.0, 1e4, -1e9, float("inf"), -float("inf"), 448.0])
    with CastToNan():
        bare, clamped = values.to(E4M3).float(), to_e4m3(values).float()
    assert bare.isnan().tolist() == [True] * 6 + [False], "the device makes NaN"
    assert clamped.tolist() == [448, -448, 448, -448, 448, -448, 448]


def test_fp8_group_with_amax_3_5() -> None:
    group = torch.zeros(128, 128)
    group[0, :4] = torch.tensor([-1.0, 0.001, 0.3, 3.5])
    weight = Fp8BlockWeight.quantize(group)
    assert weight.scale_inv.item() == 0.0078125
    assert weight.data.view(torch.uint8)[0, :4].tolist() == [0xF0, 0x20, 0x62, 0x7E]
    assert weight.dequantize()[0, :4].tolist() == [-1.0, 0.0009765625, 0.3125, 3.5]
    assert torch.equal(fp8_groups(group, weight)[0, :4], weight.dequantize()[0, :4])
    per_tensor = Fp8TensorWeight.quantize(group)
    assert per_tensor.scale.item() == 0.0078125
    assert torch.equal(per_tensor.data.view(torch.uint8), weight.data.view(torch.uint8))


@rows("rounding", fp8_groups, fp8_tokens, fp8_static, mxfp4_groups, nvfp4_static)
def test_tokens_and_groups_of_zeros_stay_zero_beside_others(rounding: ActivationQuant) -> None:
    x = torch.ones(3, 256)
    x[1], x[2, 128:] = 0, 0
    got = rounding(x, Nvfp4Weight.quantize(torch.ones(16, 256), torch.tensor(0.01)))
    assert torch.equal(got == 0, x == 0)


NVFP4_BLOCK = [0.1, -0.2, 0.3, 0.4, -0.5, 0.6, 0.7, -0.8, 0.9, 1, -1.1, 1.2, 0.05, 0, -1.5, 3]


def test_nvfp4_with_tensor_amax_24() -> None:
    dense = torch.tensor([NVFP4_BLOCK, [0.1 * (i - 7) for i in range(16)], [24.0] + [0.0] * 15])
    weight = Nvfp4Weight.quantize(dense)
    assert weight.scale_2.item() == pytest.approx(0.00892857, rel=1e-6)
    assert weight.scales.view(torch.uint8).flatten().tolist() == [0x66, 0x57, 0x7E]
    assert weight.scales.float().flatten().tolist() == [56, 15, 448]
    assert torch.equal(weight.codes[0], codes("90212AB3444C007D"))
    assert torch.equal(weight.codes[1], codes("EFDEBC0931546677"))
    decoded = weight.dequantize()
    want = [0, -0.25, 0.25, 0.5, -0.5, 0.5, 0.75, -0.75, 1, 1, -1, 1, 0, 0, -1.5, 3]
    torch.testing.assert_close(decoded[0], torch.tensor(want), rtol=1e-6, atol=0)
    torch.testing.assert_close(decoded[1, :4], torch.tensor([-0.803571, -0.535714, -0.535714, -0.401786]))
    torch.testing.assert_close(decoded[1, -3:], torch.tensor([0.535714, 0.803571, 0.803571]))
    carrier = Nvfp4Weight(weight.codes, weight.scales, weight.scale_2, input_scale=torch.tensor(24 / 2688))
    torch.testing.assert_close(nvfp4_static(dense, carrier), decoded, rtol=1e-6, atol=0)


def test_nvfp4_block_whose_scale_rounds_to_zero_has_zero_codes() -> None:
    dense = torch.zeros(1, 32)
    dense[0, 0], dense[0, 16] = 1.0, 1e-9
    weight = Nvfp4Weight.quantize(dense)
    assert weight.scales.float().tolist() == [[448, 0]]
    assert weight.codes[0, 8:].tolist() == [0] * 8
    assert weight.dequantize()[0, 16:].tolist() == [0] * 16
