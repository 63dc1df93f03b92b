"""FP8 linear layers on one GPU against bf16 ones, in CUDA graphs, weights not in the L2.

    python -m benchmarks.bench_fp8_linear [--tp 1,8] [--tokens 1,16,64,2048] [--out NAME] [--plans]

Shapes are DeepSeek-V3's linear layers as one of `tp` ranks has them. Each case is compared with the dequantized weight
in fp32 before it is timed. "share" is the part of 4.3 TB/s that the bytes of the weight over the time are, which an
H200 reached in plain copies. `--plans` times every plan of the case instead of the chosen one. The last line is JSON.
"""

import argparse
import json
import math
from collections.abc import Callable

import torch

from benchmarks import record
from benchmarks.bench_attention import graph_us
from model import fp8_linear
from model.fp8_linear import BATCH_PLANS, DECODE_PLANS, PREFILL_PLANS, Fp8Linear, LinearPlan
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


def plans_for(num_tokens: int) -> tuple[LinearPlan, ...]:
    return DECODE_PLANS if num_tokens <= 16 else BATCH_PLANS if num_tokens <= 64 else PREFILL_PLANS


def measure(shape: tuple[int, int], num_tokens: int, plan: LinearPlan | None) -> dict[str, object]:
    """One case; `plan` None is the chosen one."""
    num_copies = max(2, min(MOST_COPIES, math.ceil(ROTATION_BYTES / math.prod(shape))))
    weight = Fp8BlockWeight.quantize(torch.randn(shape, device="cuda"))
    x_TK = torch.randn(num_tokens, shape[1], device="cuda").bfloat16()
    choose = fp8_linear.choose_plan
    try:
        if plan is not None:
            fp8_linear.choose_plan = lambda *_: plan
        layers = [Fp8Linear(Fp8BlockWeight(weight.data.clone(), weight.scale_inv), None) for _ in range(num_copies)]
        got = layers[0](x_TK).float()
        want = torch.nn.functional.linear(x_TK.float(), weight.dequantize())
        error = float((got - want).norm() / want.norm())
        if not error < TOLERANCE:
            raise SystemExit(f"{shape}, {num_tokens} tokens, {plan}: relative error {error:.3g}")
        fp8_us = microseconds([lambda layer=layer: layer(x_TK) for layer in layers])
    finally:
        fp8_linear.choose_plan = choose
    dense = [weight.dequantize(torch.bfloat16) for _ in range(max(2, num_copies // 2))]
    bf16_us = microseconds([lambda each=each: torch.nn.functional.linear(x_TK, each) for each in dense])
    chosen = plan or choose(num_tokens, shape[0], fp8_linear._num_processors(weight.device))
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
                    for plan in plans_for(num_tokens) if options.plans else (None,):
                        results.append({"tp": tp, "name": name} | measure(shape, num_tokens, plan))
                        print(results[-1], flush=True)
    content = {"environment": record.environment(), "results": results}
    if options.out:
        record.write(options.out, content)
    print(json.dumps(content))


if __name__ == "__main__":
    main()
