"""A small DeepSeek-V3 in FP8 blocks with the kernels of GPUs in Triton's interpreter; prints how far logits are off.

Started as a program of its own, since Triton decides when it is imported whether it compiles or interprets.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from model import load
from model.config import ModelSettings
from model.decoder import Model
from model.fp8_linear import Fp8Linear
from model.linear import Linear
from model.registry import build_model
from tests.model import checkpoints
from tests.model.paged import PagedCache, run

STEPS = [{"a": list(range(1, 30)), "b": [5, 6]}, {"a": [3], "b": [4]}, {"b": list(range(20)), "a": [9]}]


def models(folder: Path) -> tuple[Model, Model]:
    """Without and with the kernels. Sizes keep every linear layer in FP8."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "q_lora_rank": 128}
    state = checkpoints.state_by_file_name(checkpoints.make_deepseek(**sizes), folder)
    checkpoints.write(folder, checkpoints.pack_fp8(state)[0])
    settings = ModelSettings(selfcheck="off", dtype=torch.float32)
    plain = build_model(folder, settings)
    load.keeps_fp8 = lambda settings: True
    return plain, build_model(folder, replace(settings, attention_backend="triton"))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        plain, fast = models(Path(folder))
        linears = [each for each in fast.modules() if isinstance(each, Linear)]
        errors = []
        caches = [PagedCache(model.kv_specs) for model in (plain, fast)]
        for step in STEPS:
            batches = [cache.batch(step, all_logits=True) for cache in caches]
            want, got = (run(*each) for each in zip((plain, fast), batches, (c.layers for c in caches), strict=True))
            errors.append(float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max()))
    num_fp8 = sum(isinstance(each._fp8, Fp8Linear) for each in linears)
    num_gated = sum(each.is_gated for each in linears)
    json.dump({"errors": errors, "num_fp8": num_fp8, "num_gated": num_gated}, sys.stdout)


if __name__ == "__main__":
    main()
