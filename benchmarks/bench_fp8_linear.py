"""FP8 linear layers on one GPU against bf16 ones, in CUDA graphs, weights not in the L2.

    python -m benchmarks.bench_fp8_linear [--tp 1,8] [--tokens 1,16,64,2048] [--out NAME] [--plans]

Shapes are DeepSeek-V3's linear layers as one of `tp` ranks has them. Each case is compared with the dequantized weight
in fp32 before it is timed. "share" is the part of 4.3 TB/s that the bytes of the weight over the time are, which an
H200 reached in plain copies. `--plans` times every plan instead of the chosen one. The last line is JSON.
"""

import argparse
import json
import math
from collections.abc import Callable

import torch

from benchmarks import record
from benchmarks.bench_attention import graph_us
from model.fp8_linear import PLANS, Fp8Linear, LinearPlan, choose_plan, with_shares
from moe.device import num_processors
from moe.formats import Fp8BlockWeight

BYTES_PER_S = 4.3e12
ROTATION_BYTES = 400e6  # of all copies of a weight together: eight times the L2
MOST_COPIES = 64
TOLERANCE = 0.01  # relative, bf16 results


def shapes(tp: int) -> dict[str, tuple[int, int]]:
    """[N, K] by name."""
    return {
        "latents": (2112, 7168),
        "q_b": (24576 // tp, 1536),
        "o": (7168, 16384 // tp),
        "dense gate_up": (2 * 18432 // tp, 7168),
        "dense down": (7168, 18432 // tp),
        "shared gate_up": (2 * 2048 // tp, 7168),
        "shared down": (7168, 2048 // tp),
    }


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Median time of a call; a graph holds one call on each copy."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph_us(graph) / len(calls)


def measure(shape: tuple[int, int], num_tokens: int, plan: LinearPlan | None) -> dict[str, object]:
    """One case; `plan` None is the chosen one."""
    num_copies = max(2, min(MOST_COPIES, math.ceil(ROTATION_BYTES / math.prod(shape))))
    weight = Fp8BlockWeight.quantize(torch.randn(shape, device="cuda"))
    x_TK = torch.randn(num_tokens, shape[1], device="cuda").bfloat16()
    processors = num_processors(weight.device, 1)
    chosen = choose_plan(num_tokens, *shape, processors)
    if plan is not None:
        chosen = with_shares(plan, num_tokens, *shape, processors)
    layers = [Fp8Linear(weight, None) for _ in range(num_copies)]
    got = layers[0](x_TK, chosen).float()
    want = torch.nn.functional.linear(x_TK.float(), weight.dequantize())
    error = float((got - want).norm() / want.norm())
    if not error < TOLERANCE:
        raise SystemExit(f"{shape}, {num_tokens} tokens, {chosen}: relative error {error:.3g}")
    fp8_us = microseconds([lambda layer=layer: layer(x_TK, chosen) for layer in layers])
    dense = [weight.dequantize(torch.bfloat16) for _ in range(max(2, num_copies // 2))]
    bf16_us = microseconds([lambda each=each: torch.nn.functional.linear(x_TK, each) for each in dense])
    return {
        "shape": shape, "tokens": num_tokens, "plan": str(chosen), "error": error, "fp8_us": round(fp8_us, 2),
        "bf16_us": round(bf16_us, 2), "share": round(weight.nbytes / fp8_us * 1e6 / BYTES_PER_S, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--tp", default="1,8")
    parser.add_argument("--tokens", default="1,16,64,2048")
    parser.add_argument("--out")
    parser.add_argument("--plans", action="store_true")
    options = parser.parse_args()
    results = []
    with torch.inference_mode():
        for tp in map(int, options.tp.split(",")):
            for name, shape in shapes(tp).items():
                for num_tokens in map(int, options.tokens.split(",")):
                    for plan in PLANS if options.plans else (None,):
                        results.append({"tp": tp, "name": name} | measure(shape, num_tokens, plan))
                        print(results[-1], flush=True)
    content = {"environment": record.environment(), "results": results}
    if options.out:
        record.write(options.out, content)
    print(json.dumps(content))


if __name__ == "__main__":
    main()
