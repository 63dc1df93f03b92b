"""Random experts and the tensors that checkpoints of every kind store for them. Used by the loader tests only."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from loaders.checkpoint import Checkpoint
from moe import ExpertShape
from moe.formats import Fp8BlockWeight, Fp8TensorWeight, Mxfp4Weight, Nvfp4Weight

Tensors = dict[str, torch.Tensor]
FORMATS = ("bf16", "fp8_block", "fp8_tensor", "nvfp4", "mxfp4")


def shape_of(num_experts: int, hidden: int, inter: int) -> ExpertShape:
    """Readers do not look at top-k."""
    return ExpertShape(num_experts=num_experts, top_k=1, hidden_size=hidden, intermediate_size=inter)


def save(folder: Path, tensors: Tensors, name: str = "model.safetensors") -> Checkpoint:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous().clone() for key, value in tensors.items()}, folder / name)
    return Checkpoint.open(folder)


def random_bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def linear_tensors(prefix: str, dense_NK: torch.Tensor, kind: str) -> tuple[Tensors, torch.Tensor]:
    """Tensors as published for one quantized layer, and the fp32 matrix that they mean."""
    weight = f"{prefix}.weight"
    if kind == "bf16":
        return {weight: dense_NK}, dense_NK.float()
    if kind == "fp8_block":
        block = Fp8BlockWeight.quantize(dense_NK)
        return {weight: block.data, f"{weight}_scale_inv": block.scale_inv}, block.dequantize()
    if kind == "fp8_tensor":
        tensor = Fp8TensorWeight.quantize(dense_NK)
        scales = {f"{weight}_scale": tensor.scale, f"{prefix}.input_scale": torch.tensor(0.25)}
        return {weight: tensor.data, **scales}, tensor.dequantize()
    if kind == "nvfp4":
        nv = Nvfp4Weight.quantize(dense_NK)
        scales = {
            f"{weight}_scale": nv.scales,
            f"{weight}_scale_2": nv.scale_2,
            f"{prefix}.input_scale": torch.tensor(0.5),
        }
        return {weight: nv.codes, **scales}, nv.dequantize()
    mx = Mxfp4Weight.quantize(dense_NK)
    return {weight: mx.codes, f"{weight}_scale": mx.scales}, mx.dequantize()


def split_experts(kind: str, num_experts: int, hidden: int, inter: int) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    """Per-expert tensors under "x", and the dense w13 [E, 2I, H] and w2 [E, H, I] that they mean."""
    tensors: Tensors = {}
    dense: dict[str, list[torch.Tensor]] = {"gate_proj": [], "up_proj": [], "down_proj": []}
    for e in range(num_experts):
        for index, (name, matrices) in enumerate(dense.items()):
            shape = (hidden, inter) if name == "down_proj" else (inter, hidden)
            stored, meant = linear_tensors(f"x.{e}.{name}", random_bf16(*shape, seed=3 * e + index), kind)
            tensors |= stored
            matrices.append(meant)
    w13 = torch.cat([torch.stack(dense["gate_proj"]), torch.stack(dense["up_proj"])], dim=1)
    return tensors, w13, torch.stack(dense["down_proj"])


def fused_experts(
    num_experts: int, hidden: int, inter: int, *, published: bool
) -> tuple[Tensors, dict[str, torch.Tensor]]:
    """GPT-OSS tensors under "x", and what they mean: w13 [E, 2I, H], w2, b13 [E, 2I], b2 in canonical order."""
    rows_E2IH = random_bf16(num_experts, 2 * inter, hidden, seed=1)
    down_EHI = random_bf16(num_experts, hidden, inter, seed=2)
    bias_E2I, down_bias_EH = random_bf16(num_experts, 2 * inter, seed=3), random_bf16(num_experts, hidden, seed=4)
    tensors = {"x.gate_up_proj_bias": bias_E2I, "x.down_proj_bias": down_bias_EH}
    meant_rows, meant_down = rows_E2IH.float(), down_EHI.float()
    if published:
        for name, dense in (("gate_up_proj", rows_E2IH), ("down_proj", down_EHI)):
            weight = Mxfp4Weight.quantize(dense)
            tensors[f"x.{name}_blocks"] = weight.codes.unflatten(-1, (-1, 16))
            tensors[f"x.{name}_scales"] = weight.scales
        meant_rows, meant_down = (
            Mxfp4Weight.quantize(rows_E2IH).dequantize(),
            Mxfp4Weight.quantize(down_EHI).dequantize(),
        )
    else:
        tensors |= {"x.gate_up_proj": rows_E2IH.transpose(1, 2), "x.down_proj": down_EHI.transpose(1, 2)}
    return tensors, {
        "w13": torch.cat([meant_rows[:, 0::2], meant_rows[:, 1::2]], dim=1),
        "w2": meant_down,
        "b13": torch.cat([bias_E2I[:, 0::2], bias_E2I[:, 1::2]], dim=1),
        "b2": down_bias_EH,
    }
