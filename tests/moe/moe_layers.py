"""Small layers of every format for the MoE tests."""

import torch

from moe import Activation, MoeRunnerConfig, StandardTopK
from moe.formats import Bf16Weight, ExpertWeights, Fp8BlockWeight, Fp8TensorWeight, Mxfp4Weight, Nvfp4Weight, Weight
from tests.moe.configs import rank_config
from tests.moe.joining import concat_rows

HAS_FBGEMM = torch.backends.quantized.engine in ("x86", "fbgemm")  # what packed CPU weights need
PLAIN = Activation()
GPT_OSS = Activation(alpha=1.702, beta=1.0, limit=7.0)
DEEPSEEK_V4 = Activation(limit=10.0)
FORMATS: dict[str, type[Weight]] = {
    kind.format_name: kind for kind in (Bf16Weight, Fp8BlockWeight, Fp8TensorWeight, Mxfp4Weight, Nvfp4Weight)
}


def make_experts(
    format_name: str, num_experts: int = 4, hidden: int = 64, inter: int = 128, *, bias: bool = True, seed: int = 0
) -> ExpertWeights:
    """Gate unlike up, every expert of another size, scales per half where the format has them."""
    g = torch.Generator().manual_seed(seed)
    kind = FORMATS[format_name]
    size = (torch.arange(num_experts) + 1.0)[:, None, None]
    gate = kind.quantize(size * torch.randn(num_experts, inter, hidden, generator=g))
    up = kind.quantize(0.7 * size * torch.randn(num_experts, inter, hidden, generator=g))
    w2 = kind.quantize(torch.randn(num_experts, hidden, inter, generator=g) / size)
    b13 = torch.randn(num_experts, 2 * inter, generator=g) if bias else None
    b2 = 3 * torch.randn(num_experts, hidden, generator=g) if bias else None
    return ExpertWeights(w13=concat_rows(gate, up), w2=w2, b13=b13, b2=b2)


def make_config(experts: ExpertWeights, **changes: object) -> MoeRunnerConfig:
    settings: dict[str, object] = {
        "num_experts": experts.num_experts, "hidden_size": experts.hidden_size,
        "intermediate_size": experts.intermediate_size, "top_k": 2, "activation": GPT_OSS, "dtype": torch.float32,
        "has_biases": experts.b13 is not None,
    }  # fmt: skip
    return rank_config(**(settings | changes))  # type: ignore[arg-type]


def random_topk(num_tokens: int, num_experts: int, top_k: int = 2, seed: int = 1) -> StandardTopK:
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(num_experts, generator=g)[:top_k] for _ in range(num_tokens)]).int()
    return StandardTopK(torch.rand(num_tokens, top_k, generator=g) + 0.1, ids)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())
