"""Sizes that are computed before loading equal those of what loading makes."""

import pytest
import torch

from moe import MoeBackend, Topology
from moe.backends.aiter.gpt_oss import GPT_OSS, prepare_gpt_oss
from moe.backends.flashinfer.mxfp4 import TILE, _Staged
from moe.device import Device
from moe.errors import WeightFormatError
from moe.formats.sizes import expert_bytes, weight_bytes
from moe.kernels.layout import pack_matrix
from moe.layouts.rows import round_up
from moe.registry import load_backend
from tests.moe.configs import rank_config
from tests.moe.moe_layers import FORMATS, make_config, make_experts
from tests.tables import rows

CPU = torch.device("cpu")
PACKED = ("bf16", "fp8_block", "mxfp4", "nvfp4")


@rows("format_name", *FORMATS)
@rows("rows, cols", (64, 96), (160, 288), (128, 256), (1, 32))
def test_stored_bytes_of_known_formats(format_name, rows, cols):
    weight = FORMATS[format_name].quantize(torch.randn(3, rows, cols))
    data = weight.nbytes
    if format_name in ("fp8_tensor", "nvfp4") and weight.input_scale is not None:
        data -= weight.input_scale.nbytes
    assert data == 3 * weight_bytes(format_name, rows, cols)
    with pytest.raises(WeightFormatError, match="int3"):
        weight_bytes("int3", rows, cols)


@rows("format_name", *PACKED)
@rows(
    "hidden, inter, has_bias",
    (64, 128, True), (288, 288, True), (192, 160, False), (96, 32, True), (2880, 96, False), (352, 224, True),
)  # fmt: skip
def test_bytes_of_the_triton_layout(format_name, has_bias, hidden, inter):
    inter = -(-inter // 128) * 128 if format_name == "fp8_block" else inter
    experts = make_experts(format_name, 2, hidden, inter, bias=has_bias)
    config = make_config(experts, dtype=torch.bfloat16)
    w13 = pack_matrix(experts.w13, experts.b13, is_gated=True)
    w2 = pack_matrix(experts.w2, experts.b2, is_gated=False)
    expected = load_backend(MoeBackend.TRITON).layer_bytes(format_name, config, Device(arch="sm90"))
    assert w13.nbytes + w2.nbytes == expected


@rows("arch", "sm90", "sm100")
@rows("has_bias", False, True)
def test_bytes_of_flashinfers_mxfp4_layout(arch, has_bias):
    hidden, inter = (320, 160) if has_bias else (256, 512)
    experts = make_experts("mxfp4", 2, hidden, inter, bias=has_bias)
    tile = TILE[arch]
    staged = _Staged.of(experts, (round_up(hidden, tile), round_up(inter, tile)), CPU)
    total = sum(part.nbytes for part in (staged.codes13, staged.scales13, staged.codes2, staged.scales2))
    if staged.b13 is not None and staged.b2 is not None:
        total += (staged.b13.numel() + staged.b2.numel()) * (2 if arch == "sm90" else 4)
    config = make_config(experts, dtype=torch.bfloat16)
    backend = load_backend(MoeBackend.FLASHINFER_MXFP4)
    assert backend.layer_bytes("mxfp4", config, Device(arch=arch)) == total


def test_bytes_of_aiters_gpt_oss_layout():
    experts = make_experts("mxfp4", 2, 320, 160)
    laid_out = prepare_gpt_oss(experts, experts.w13, experts.w2, Topology(device=CPU))
    parts = (laid_out.w13, laid_out.w13_scale, laid_out.w2, laid_out.w2_scale, laid_out.parts.b13, laid_out.parts.b2)
    config = make_config(experts, dtype=torch.bfloat16, activation=GPT_OSS)
    backend, device = load_backend(MoeBackend.AITER), Device(arch="gfx950")
    assert backend.layer_bytes("mxfp4", config, device) == sum(part.nbytes for part in parts)
    plain = rank_config(num_experts=2, hidden_size=256, intermediate_size=512, top_k=config.top_k)
    assert backend.layer_bytes("fp8_block", plain, device) == 2 * expert_bytes("fp8_block", 256, 512)


@rows("dtype", torch.float32, torch.bfloat16)
def test_bytes_of_the_torch_backend_are_those_of_dense_weights(dtype):
    experts = make_experts("mxfp4", 3, 64, 96)
    config = make_config(experts, dtype=dtype)
    numbers = 3 * (2 * 96 * 64 + 64 * 96 + 2 * 96 + 64)
    backend = load_backend(MoeBackend.TORCH)
    assert backend.layer_bytes("mxfp4", config, Device(arch="cpu")) == numbers * dtype.itemsize


def test_other_backends_keep_what_is_stored():
    experts = make_experts("fp8_block", 2, 256, 128, bias=False)
    config = make_config(experts, dtype=torch.bfloat16)
    for name in (MoeBackend.DEEP_GEMM, MoeBackend.FLASHINFER_CUTLASS, MoeBackend.FLASHINFER_TRTLLM):
        assert load_backend(name).layer_bytes("fp8_block", config, Device(arch="sm100")) == experts.nbytes
