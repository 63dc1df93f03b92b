"""Small random checkpoints for the tests of divided models."""

from pathlib import Path
from typing import Any

from tests.model import checkpoints


def write_checkpoint(kind: str, folder: Path) -> Path:
    """A small random model in its published form; FP8 blocks that two ranks divide between blocks, four inside them."""
    folder.mkdir(exist_ok=True)
    if kind == "gpt_oss":
        tensors = checkpoints.state_by_file_name(checkpoints.make_gpt_oss(vocab_size=97), folder)
        checkpoints.write(
            folder, checkpoints.pack_mxfp4(tensors)[0], {"quantization_config": {"quant_method": "mxfp4"}}
        )
        return folder
    sizes: dict[str, Any] = {
        "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "q_lora_rank": 128,
        "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 48, "v_head_dim": 64, "vocab_size": 97,
    }  # fmt: skip
    reference = checkpoints.make_deepseek(**(sizes if kind == "deepseek" else {"vocab_size": 97}))
    tensors = checkpoints.state_by_file_name(reference, folder)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    checkpoints.write(folder, checkpoints.pack_fp8(tensors)[0], {"quantization_config": quantization})
    return folder
