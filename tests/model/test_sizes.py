"""The sizes that headers promise are those of the loaded model, byte by byte."""

from pathlib import Path

import torch

from model.config import ModelSettings
from model.linear import Linear
from model.moe_layer import MoeLayer
from model.registry import build_model
from model.sizes import measure_model
from moe import MoeBackend
from tests.model import checkpoints
from tests.tables import rows

ASSETS = Path(__file__).parents[2] / "assets" / "tiny-gpt-oss"


COPIES = ("weight_bf16", "scaled_weight", "root_eps")  # left out of the sizes


def dense_bytes(model) -> int:
    """Everything but the routed experts. Packed linears count as the fp32 weights that they came from."""
    total, tensors = 0, {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.rsplit(".", 1)[-1] not in COPIES:
            tensors[tensor.data_ptr()] = tensor
    for module in model.modules():
        if isinstance(module, Linear):
            weight_NK = getattr(module._multiply, "_weight_NK", None)
            if weight_NK is None:
                total += packed_bytes(module)
            for tensor in (weight_NK, module._multiply._bias_N):
                if tensor is not None:
                    tensors[tensor.data_ptr()] = tensor
    return total + model.rope.table_PD.nbytes + sum(tensor.nbytes for tensor in tensors.values())


def packed_bytes(module: Linear) -> int:
    unpacked_NK, _ = torch.ops.quantized.linear_unpack_fp16(module._multiply._many_rows)
    return unpacked_NK.numel() * torch.float32.itemsize


def expert_bytes(model) -> int:
    total = 0
    for layer in model.modules():
        if isinstance(layer, MoeLayer):
            for linears in (layer.quant_info.w13, layer.quant_info.w2):
                total += sum(each._weight_NK.nbytes + each._bias_N.nbytes for each in linears)
    return total


@rows("dtype", torch.float32, torch.bfloat16)
def test_the_bundled_model(dtype):
    settings = ModelSettings(dtype=dtype, selfcheck="off")
    sizes = measure_model(ASSETS, settings)
    model = build_model(ASSETS, settings)
    assert sizes.total_bytes - sizes.expert_bytes == dense_bytes(model)
    if dtype == torch.bfloat16:  # fp32 experts are packed
        assert sizes.expert_bytes == expert_bytes(model)
    (path,) = sizes.experts
    assert (path.backend, path.format_name, path.num_layers) == (MoeBackend.TORCH, "mxfp4", 6)
    assert sizes.kv_specs == tuple(model.kv_specs)
    assert sizes.max_model_len == model.max_model_len
    file = ASSETS / "model.safetensors"
    with file.open("rb") as data:
        header_bytes = 8 + int.from_bytes(data.read(8), "little")
    assert sizes.stored_bytes == file.stat().st_size - header_bytes


@rows("pack", "plain", "fp8", "nvfp4")
def test_deepseek_in_every_form(tmp_path, pack):
    reference = checkpoints.make_deepseek()
    tensors = checkpoints.state_by_file_name(reference, tmp_path)
    if pack == "fp8":
        tensors, _ = checkpoints.pack_fp8(tensors)
    elif pack == "nvfp4":
        tensors, _ = checkpoints.pack_nvfp4(tensors)
    checkpoints.write(tmp_path, tensors)
    settings = ModelSettings(dtype=torch.bfloat16, selfcheck="off")
    sizes = measure_model(tmp_path, settings)
    assert sizes.total_bytes - sizes.expert_bytes == dense_bytes(build_model(tmp_path, settings))
    assert sizes.head_bytes == sizes.embedding_bytes == checkpoints.VOCAB * 160 * 2
    (path,) = sizes.experts
    assert path.num_layers == 2
    without_head = sizes.total_bytes - sizes.head_bytes  # which is read last
    assert sizes.peak_bytes == max(sizes.total_bytes, without_head + path.stored_bytes + path.processed_bytes)
    assert sizes.least_bytes == sizes.total_bytes - 2 * max(0, path.processed_bytes - path.stored_bytes)


def test_a_tied_head_takes_no_memory(tmp_path):
    reference = checkpoints.make_gpt_oss(tie_word_embeddings=True)
    tensors = checkpoints.state_by_file_name(reference, tmp_path)
    tensors.pop("lm_head.weight", None)
    checkpoints.write(tmp_path, tensors)
    settings = ModelSettings(dtype=torch.bfloat16, selfcheck="off")
    sizes = measure_model(tmp_path, settings)
    assert sizes.head_bytes == 0
    assert sizes.total_bytes - sizes.expert_bytes == dense_bytes(build_model(tmp_path, settings))
