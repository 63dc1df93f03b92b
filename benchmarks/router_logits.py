"""Which experts are chosen otherwise when router logits are BF16 instead of FP32, and by how much that moves weights.

    python -m benchmarks.router_logits [--prompts 300] [--out router_logits] [--folder FOLDER]

Two subjects: the bundled model, with the tokens that its gates see over prompts of `evals/data` (bf16 activations, as
on a card), and random gates of DeepSeek-V3's shape. Each is routed by the gate with FP32 logits, by the gate with BF16
logits, and, as a yardstick, by the FP32 gate on tokens that were moved by one rounding to BF16: what the activations
before the gate already lose. Needs no GPU. The last line is JSON.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from engine.kv_cache import KvLayout
from loaders.tokenizer import load_tokenizer
from model.batch import ForwardBatch
from model.config import ModelSettings
from model.decoder import Model
from model.moe_layer import Gate
from model.registry import build_model
from moe.config import RoutingConfig, RoutingMethod
from moe.routing import StandardTopK, route
from server.prompt import ChatTemplate

ROOT = Path(__file__).parents[1]
PAGE_SIZE = 16
DEEPSEEK_HIDDEN, DEEPSEEK_TOKENS, NUM_GATES = 7168, 2048, 4
DEEPSEEK = RoutingConfig(
    method=RoutingMethod.SIGMOID_GROUPED, num_experts=256, top_k=8, num_groups=8, num_kept_groups=4,
    routed_scaling_factor=2.5,
)  # fmt: skip
LOGIT_STDS = (0.5, 1.0, 2.0)  # 0.5: weights as DeepSeek-V3 is initialized (0.006); training widens them
BIAS_STD = 0.05
HALF_STEP = 2.0**-9  # a rounding to bf16 moves a number by up to this share of it


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How two routings of the same tokens differ; shares of all tokens, or of all chosen slots."""

    tokens_with_other_experts: float
    slots_with_other_experts: float
    tokens_in_another_order: float  # the same experts, otherwise sorted by weight
    mean_weight_moved: float  # half the sum of |difference of an expert's weight|, as a share of the token's weights
    worst_weight_moved: float


def difference(first: StandardTopK, second: StandardTopK, num_experts: int) -> Difference:
    """Of two routings [T, K]."""
    dense_1_TE, dense_2_TE = (
        torch.zeros(len(topk.ids), num_experts).scatter_(1, topk.ids.long(), topk.weights) for topk in (first, second)
    )
    is_chosen_1_TE, is_chosen_2_TE = (
        torch.zeros(len(topk.ids), num_experts, dtype=torch.bool).scatter_(1, topk.ids.long(), True)
        for topk in (first, second)
    )
    others_T = (is_chosen_1_TE & ~is_chosen_2_TE).sum(1)
    order_1, order_2 = (
        topk.ids.gather(1, topk.weights.sort(dim=1, descending=True, stable=True).indices) for topk in (first, second)
    )
    moved_T = (dense_1_TE - dense_2_TE).abs().sum(1) / 2 / dense_1_TE.sum(1)
    return Difference(
        tokens_with_other_experts=float((others_T > 0).float().mean()),
        slots_with_other_experts=float(others_T.sum() / first.ids.numel()),
        tokens_in_another_order=float(((order_1 != order_2).any(1) & (others_T == 0)).float().mean()),
        mean_weight_moved=float(moved_T.mean()),
        worst_weight_moved=float(moved_T.max()),
    )


def compare(
    weight_EH: torch.Tensor, bias_E: torch.Tensor | None, correction_E: torch.Tensor | None, x_TH: torch.Tensor,
    routing: RoutingConfig, generator: torch.Generator,
) -> dict[str, Any]:  # fmt: skip
    """BF16 logits against FP32 ones, and the yardstick: FP32 logits of tokens that one more rounding has moved."""
    full, half = (Gate(weight_EH, bias_E, dtype) for dtype in (torch.float32, torch.bfloat16))
    logits_TE = full(x_TH)
    moved_TH = x_TH.float() * (1 + HALF_STEP * (2 * torch.rand(x_TH.shape, generator=generator) - 1))
    reference = route(logits_TE, routing, correction_E)
    return {
        "num_tokens": len(x_TH),
        "logit_std": float(logits_TE.std()),
        "bf16_logits": asdict(difference(reference, route(half(x_TH), routing, correction_E), routing.num_experts)),
        "yardstick": asdict(difference(reference, route(full(moved_TH), routing, correction_E), routing.num_experts)),
    }


def prompts(count: int) -> list[list[dict[str, Any]]]:
    """Messages of the first prompts of every file in turn."""
    files = [path.read_text().splitlines() for path in sorted((ROOT / "evals" / "data").glob("*.jsonl"))]
    rows = [row for turn in zip(*(file[:count] for file in files), strict=False) for row in turn]
    return [json.loads(row)["messages"] for row in rows[:count]]


def run_prompt(model: Model, ids: list[int]) -> torch.Tensor:
    """fp32 logits [T, V] of every token of one prompt."""
    num_tokens = len(ids)
    num_pages = -(-num_tokens // PAGE_SIZE)
    kv = KvLayout(specs=tuple(model.kv_specs), page_size=PAGE_SIZE, dtype=model.dtype).allocate(num_pages, model.device)
    positions_T = torch.arange(num_tokens)
    batch = ForwardBatch(
        input_ids_T=torch.tensor(ids), positions_T=positions_T, slots_T=positions_T,
        query_start_B1=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens_B=torch.tensor([num_tokens], dtype=torch.int32),
        page_table_BP=torch.arange(num_pages, dtype=torch.int32)[None], logit_rows_R=positions_T,
        query_lens=(num_tokens,), seq_lens=(num_tokens,), page_size=PAGE_SIZE,
    )  # fmt: skip
    logits_TV: torch.Tensor = model(batch, model.plan(batch), kv)
    return logits_TV


def recording(
    forward: Callable[[torch.Tensor], torch.Tensor], inputs: list[torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`forward`, which also appends what it is given to `inputs`."""

    def recorded(x_TH: torch.Tensor) -> torch.Tensor:
        inputs.append(x_TH)
        return forward(x_TH)

    return recorded


def bundled(num_prompts: int, generator: torch.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """By layer what its gate does, and what the next-token distributions of the two models say."""
    folder = ROOT / "assets" / "tiny-gpt-oss"
    models = [
        build_model(folder, ModelSettings(dtype=torch.bfloat16, selfcheck="off", router_logits_dtype=name))  # type: ignore[arg-type]
        for name in ("float32", "bfloat16")
    ]
    seen: list[list[torch.Tensor]] = [[] for _ in models[0].moe_layers]
    for layer, inputs in zip(models[0].moe_layers, seen, strict=True):
        layer.gate.forward = recording(layer.gate.forward, inputs)  # type: ignore[method-assign]
    agreements, divergences = [], []
    for ids in tokenized(folder, num_prompts):
        first_TV, second_TV = (run_prompt(model, ids) for model in models)
        agreements.append(first_TV.argmax(1) == second_TV.argmax(1))
        p, q = first_TV.log_softmax(1), second_TV.log_softmax(1)
        divergences.append((p.exp() * (p - q)).sum(1))
    layers = {
        f"layer {index}": compare(layer.gate.weight, layer.gate.bias, None, torch.cat(inputs), layer.routing, generator)
        for index, (layer, inputs) in enumerate(zip(models[0].moe_layers, seen, strict=True))
    }
    outputs = {
        "num_tokens": len(torch.cat(agreements)),
        "same_next_token": float(torch.cat(agreements).float().mean()),
        "mean_kl_divergence": float(torch.cat(divergences).mean()),
    }
    return layers, outputs


def tokenized(folder: Path, num_prompts: int) -> Iterator[list[int]]:
    """Token ids of the prompts, rendered as a chat."""
    template = ChatTemplate(load_tokenizer(folder))
    return (template.render(messages, (), {}) for messages in prompts(num_prompts))


def deepseek(logit_std: float, generator: torch.Generator) -> dict[str, Any]:
    """Gates of normal weights, tokens as an RMS norm leaves them, a normal correction bias; weights and tokens bf16."""
    shape, num_tokens = (DEEPSEEK.num_experts, DEEPSEEK_HIDDEN), DEEPSEEK_TOKENS
    weight_EH = (torch.randn(shape, generator=generator) * logit_std / DEEPSEEK_HIDDEN**0.5).bfloat16()
    x_TH = torch.randn(num_tokens, DEEPSEEK_HIDDEN, generator=generator)
    x_TH = (x_TH / x_TH.square().mean(1, keepdim=True).sqrt()).bfloat16()
    correction_E = torch.randn(DEEPSEEK.num_experts, generator=generator) * BIAS_STD
    return compare(weight_EH, None, correction_E, x_TH, DEEPSEEK, generator)


def mean_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of the shares over several gates, the worst of the worst."""
    out: dict[str, Any] = {"num_tokens": sum(result["num_tokens"] for result in results)}
    out["logit_std"] = sum(result["logit_std"] for result in results) / len(results)
    for name in ("bf16_logits", "yardstick"):
        values = {key: [result[name][key] for result in results] for key in results[0][name]}
        out[name] = {
            key: max(numbers) if key.startswith("worst") else sum(numbers) / len(numbers)
            for key, numbers in values.items()
        }
    return out


@torch.inference_mode()
def measure(num_prompts: int) -> dict[str, Any]:
    """Everything the record holds."""
    generator = torch.Generator().manual_seed(0)
    layers, outputs = bundled(num_prompts, generator)
    return record.environment() | {
        "num_prompts": num_prompts,
        "bundled": mean_of(list(layers.values())),
        "bundled_layers": layers,
        "bundled_outputs": outputs,
        "deepseek_v3_shape": {
            f"logit std {std}": mean_of([deepseek(std, generator) for _ in range(NUM_GATES)]) for std in LOGIT_STDS
        },
        "deepseek_v3_drawn": {
            "hidden": DEEPSEEK_HIDDEN, "experts": DEEPSEEK.num_experts, "groups": DEEPSEEK.num_groups,
            "kept_groups": DEEPSEEK.num_kept_groups, "top_k": DEEPSEEK.top_k, "correction_bias_std": BIAS_STD,
            "gates": NUM_GATES, "tokens_per_gate": DEEPSEEK_TOKENS,
        },
    }  # fmt: skip


def main() -> None:
    """Measure, write the record, print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--out", default="router_logits", help="name of the record")
    parser.add_argument("--folder", type=Path, default=record.RESULTS)
    options = parser.parse_args()
    content = measure(options.prompts)
    record.write(options.out, content, options.folder)
    print(json.dumps(content))


if __name__ == "__main__":
    main()
