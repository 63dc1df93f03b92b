"""Which dtype of router logits reaches each kernel, from the setting down: unset, fp32 and bf16."""

from pathlib import Path
from typing import Any

import pytest
import torch

from model.config import ModelSettings
from model.decoder import Model
from model.registry import build_model
from moe import MoeBackend, MoeRunner, StandardTopK
from moe.device import Device
from tests.emulators.trtllm import install_trtllm
from tests.model.checkpoints import make_deepseek, pack_fp8, pack_fp8_tensor, pack_nvfp4, state_by_file_name, write
from tests.tables import rows

WANTED = {"auto": torch.bfloat16, "float32": torch.float32, "bfloat16": torch.bfloat16}
SIZES = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 256, "num_experts_per_tok": 3}
X = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).bfloat16()


PACKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp8_block": (pack_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp8_tensor": (pack_fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "nvfp4": (pack_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}


def build(folder: Path, name: str, backend: MoeBackend, setting: str) -> Model:
    pack, quantization = PACKS[name]
    if not (folder / "config.json").exists():
        tensors, _ = pack(state_by_file_name(make_deepseek(**SIZES), folder))
        write(folder, tensors, {"quantization_config": quantization, "architectures": ["DeepseekV3ForCausalLM"]})
    settings = ModelSettings(moe_backend=backend, router_logits_dtype=setting, dtype=torch.bfloat16, selfcheck="off")  # type: ignore[arg-type]
    return build_model(folder, settings)


@rows("name", *list(PACKS))
def test_kernels_that_route_inside_get_the_dtype_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The per-tensor kernel takes bf16 only: there the setting ends at the call."""
    kernel = install_trtllm(monkeypatch)
    monkeypatch.setattr("moe.choose.select.probe_device", lambda device: Device(arch="sm100"))
    for setting, wanted in WANTED.items():
        model = build(tmp_path, name, MoeBackend.FLASHINFER_TRTLLM, setting)
        layer = model.moe_layers[0]
        kernel.calls.clear()
        layer(X)
        assert layer.gate.out_dtype == wanted
        assert kernel.calls[-1].logits.dtype == (torch.bfloat16 if name == "fp8_tensor" else wanted)


def test_kernels_that_take_ids_get_them_from_logits_in_the_dtype_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unset is fp32 there. Weights are fp32 in any case; near-ties fall otherwise in bf16."""
    seen: list[StandardTopK] = []
    original = MoeRunner.run

    def run(self: MoeRunner, dispatched: Any, quant_info: Any) -> Any:
        seen.append(dispatched.topk_output)
        return original(self, dispatched, quant_info)

    monkeypatch.setattr(MoeRunner, "run", run)
    ids: dict[str, torch.Tensor] = {}
    for setting, wanted in {**WANTED, "auto": torch.float32}.items():
        layer = build(tmp_path, "fp8_block", MoeBackend.TORCH, setting).moe_layers[0]
        assert layer.gate.out_dtype == wanted
        layer.gate.weight.copy_(layer.gate.weight[:1] * (1 + 1e-4 * torch.arange(8.0)[:, None]))  # eight near-ties
        layer.correction_bias_E.zero_()  # type: ignore[union-attr]
        seen.clear()
        layer(X)
        assert seen[0].weights.dtype == torch.float32
        ids[setting] = seen[0].ids.sort(-1).values
    assert torch.equal(ids["auto"], ids["float32"])
    assert not torch.equal(ids["bfloat16"], ids["float32"])
