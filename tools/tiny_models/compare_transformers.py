"""A bundled folder in plain transformers and in our engine: the same greedy tokens, both in fp32?

    python -m tools.tiny_models.compare_transformers [--model FOLDER] [--prompts 200] [--tokens 64]

Transformers gets the dequantized weights. Prompts are spread evenly over the categories of `evals/data`. The last line
is JSON; exit status 1 on a difference.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.types import EngineRequest, SamplingParams
from loaders.checkpoint import Checkpoint
from loaders.naming import prediction_names
from loaders.quant import read_linear
from server.model_source import BUNDLED_MODELS, bundled_models

DATA = Path(__file__).parents[2] / "evals" / "data"
_SCALES = ("_scale", "_scale_2", "_scale_inv", ".input_scale")


def prompts(folder: Path, count: int) -> list[list[int]]:
    """Rendered and encoded by transformers, which thereby checks our tokenizer files as well."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    files = sorted(DATA.glob("*.jsonl"))
    chosen = []
    for index, file in enumerate(files):
        lines = file.read_text().splitlines()
        share = count // len(files) + (index < count % len(files))
        for line in lines[:: max(1, len(lines) // share)][:share]:
            item = json.loads(line)
            chosen.append(
                tokenizer.apply_chat_template(
                    item["messages"], tools=item.get("tools"), add_generation_prompt=True, return_dict=False,
                    thinking=True,
                )
            )  # fmt: skip
    return chosen


def engine_tokens(folder: Path, all_ids: list[list[int]], num_new: int) -> list[list[int]]:
    """Eight at a time through scheduler, paged cache and batched decode."""
    core = EngineCore(EngineConfig(model=folder, dtype="float32", max_num_seqs=8))
    for index, ids in enumerate(all_ids):
        sampling = SamplingParams(max_tokens=num_new, temperature=0.0)
        core.add(EngineRequest(request_id=str(index), prompt_ids=ids, sampling=sampling))
    answers: list[list[int]] = [[] for _ in all_ids]
    while core.has_work:
        for output in core.step():
            answers[int(output.request_id)] += output.token_ids
    return answers


def dequantized_model(folder: Path) -> Any:
    """Transformers' model in fp32. It dequantizes MXFP4 itself; FP8 blocks and NVFP4 are dequantized by our loaders."""
    config = json.loads((folder / "config.json").read_text())
    if config.pop("quantization_config", {}).get("quant_method") == "mxfp4":
        mxfp4 = Mxfp4Config(dequantize=True)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=mxfp4).float()
    source = Checkpoint.open(folder)
    dense = {}
    left_out = set(prediction_names(source.names()))
    for name in source.names():
        if name.endswith(_SCALES) or name in left_out:
            continue
        is_matrix = name.endswith(".weight") and len(source.meta(name).shape) == 2
        dense[name] = (
            read_linear(source, name.removesuffix(".weight")).dequantize() if is_matrix else source.tensor(name)
        )
    with tempfile.TemporaryDirectory() as plain:
        save_file(
            {n: v.float().contiguous() for n, v in dense.items()}, Path(plain) / "model.safetensors", {"format": "pt"}
        )
        (Path(plain) / "config.json").write_text(json.dumps(config))
        return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)


def main(argv: list[str] | None = None) -> int:
    """Compare and report; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=bundled_models() / BUNDLED_MODELS[0])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args(argv)
    all_ids = prompts(args.model, args.prompts)
    ours = engine_tokens(args.model, all_ids, args.tokens)
    model = dequantized_model(args.model)
    different = []
    for index, (ids, mine) in enumerate(zip(all_ids, ours, strict=True)):
        asked = torch.tensor([ids])  # with a mask of its own, because transformers would take ids like BOS for padding
        out = model.generate(asked, attention_mask=torch.ones_like(asked), do_sample=False, max_new_tokens=args.tokens)
        theirs = out[0, len(ids) :].tolist()
        if theirs != mine:
            different.append({"prompt": index, "transformers": theirs, "engine": mine})
            print(json.dumps(different[-1]))
    num_tokens = sum(map(len, ours))
    print(json.dumps({"prompts": len(all_ids), "tokens": num_tokens, "different_prompts": len(different)}))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
