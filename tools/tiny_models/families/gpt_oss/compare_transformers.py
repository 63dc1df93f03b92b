"""The bundled folder in plain transformers and in our engine: the same greedy tokens, both in fp32?

    python -m tools.tiny_models.families.gpt_oss.compare_transformers [--prompts 200] [--tokens 64]

Prompts are spread evenly over the categories of `evals/data`. The last line is JSON; exit status 1 on a difference.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, GptOssForCausalLM, Mxfp4Config

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.types import EngineRequest, SamplingParams
from tools.tiny_models.families.gpt_oss.dialect import ASSETS

DATA = Path(__file__).parents[4] / "evals" / "data"


def prompts(count: int) -> list[list[int]]:
    """Rendered and encoded by transformers, which thereby checks our tokenizer files as well."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS)
    files = sorted(DATA.glob("*.jsonl"))
    chosen = []
    for index, file in enumerate(files):
        lines = file.read_text().splitlines()
        share = count // len(files) + (index < count % len(files))
        for line in lines[:: max(1, len(lines) // share)][:share]:
            item = json.loads(line)
            chosen.append(
                tokenizer.apply_chat_template(
                    item["messages"], tools=item.get("tools"), add_generation_prompt=True, return_dict=False
                )
            )
    return chosen


def engine_tokens(all_ids: list[list[int]], num_new: int) -> list[list[int]]:
    """Eight at a time through scheduler, paged cache and batched decode."""
    core = EngineCore(EngineConfig(model=ASSETS, dtype="float32", max_num_seqs=8))
    for index, ids in enumerate(all_ids):
        sampling = SamplingParams(max_tokens=num_new, temperature=0.0)
        core.add(EngineRequest(request_id=str(index), prompt_ids=ids, sampling=sampling))
    answers: list[list[int]] = [[] for _ in all_ids]
    while core.has_work:
        for output in core.step():
            answers[int(output.request_id)] += output.token_ids
    return answers


def main() -> int:
    """Compare and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    all_ids = prompts(args.prompts)
    ours = engine_tokens(all_ids, args.tokens)
    model = GptOssForCausalLM.from_pretrained(
        ASSETS, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    ).float()
    different = []
    for index, (ids, mine) in enumerate(zip(all_ids, ours, strict=True)):
        out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=args.tokens)
        theirs = out[0, len(ids) :].tolist()
        if theirs != mine:
            different.append({"prompt": index, "transformers": theirs, "engine": mine})
            print(json.dumps(different[-1]))
    num_tokens = sum(map(len, ours))
    print(json.dumps({"prompts": len(all_ids), "tokens": num_tokens, "different_prompts": len(different)}))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
