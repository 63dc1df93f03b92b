"""What `bench_moe` measures: layer shapes of real models, random weights of their formats, routings, and their floors.

Shape letters: T tokens, K top-k, E experts, H hidden, I intermediate.
"""

from dataclasses import dataclass

import torch

from moe import ExpertShape
from moe.config import Activation, MoeRunnerConfig
from moe.formats import Bf16Weight, ExpertWeights, Fp8BlockWeight, Mxfp4Weight, Nvfp4Weight, Weight
from moe.routing import StandardTopK

READ_BYTES_PER_S = 3.0e12  # measured on an H100: large reads
BF16_FLOPS_PER_S = 780e12  # measured on an H100: 8192^3 product of random numbers
FP8_FLOPS_PER_S = 1560e12  # twice that; not measured


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCase(ExpertShape):
    """An expert layer of a model. `num_active`: how many experts a routing of so many tokens touches, where not E."""

    model: str
    activation: Activation
    has_bias: bool
    num_active: dict[int, int]

    def config(self) -> MoeRunnerConfig:
        """The runner's settings on one rank."""
        shape = ExpertShape(
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
        )
        return MoeRunnerConfig(shape=shape, activation=self.activation)

    def active(self, num_tokens: int) -> int:
        """Stated number of active experts."""
        most = min(self.num_experts, num_tokens * self.top_k)
        return self.num_active.get(num_tokens, most)

    @property
    def expert_weights(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden_size * self.intermediate_size

    def expert_bytes(self, format_name: str) -> float:
        """Bytes of one expert's weights and scales."""
        bits = {"bf16": 16.0, "fp8_block": 8.0 + 32 / 128**2, "mxfp4": 4.25, "nvfp4": 4.5}[format_name]
        return self.expert_weights * bits / 8

    def floor_us(self, format_name: str, num_tokens: int, num_active: float) -> float:
        """The larger of reading the active experts once and doing the arithmetic."""
        read_s = num_active * self.expert_bytes(format_name) / READ_BYTES_PER_S
        rate = FP8_FLOPS_PER_S if format_name == "fp8_block" else BF16_FLOPS_PER_S
        return 1e6 * max(read_s, 2 * num_tokens * self.top_k * self.expert_weights / rate)


GPT_OSS = Activation(alpha=1.702, beta=1.0, limit=7.0)
CASES = {
    case.model: case
    for case in (
        LayerCase(
            model="gpt-oss-20b", num_experts=32, top_k=4, hidden_size=2880, intermediate_size=2880, activation=GPT_OSS,
            has_bias=True, num_active={1: 4, 2: 8, 4: 16, 8: 19, 16: 27, 32: 31},
        ),
        LayerCase(  # on one of two tensor-parallel ranks
            model="gpt-oss-20b-tp2", num_experts=32, top_k=4, hidden_size=2880, intermediate_size=1440,
            activation=GPT_OSS, has_bias=True, num_active={1: 4, 2: 8, 4: 16, 8: 19, 16: 27, 32: 31},
        ),
        LayerCase(
            model="gpt-oss-120b", num_experts=128, top_k=4, hidden_size=2880, intermediate_size=2880,
            activation=GPT_OSS, has_bias=True, num_active={4: 16, 8: 29, 16: 51, 32: 82, 64: 111, 128: 126},
        ),
        LayerCase(
            model="tiny-gpt-oss", num_experts=8, top_k=2, hidden_size=288, intermediate_size=288, activation=GPT_OSS,
            has_bias=True, num_active={4: 6},
        ),
        LayerCase(
            model="deepseek-v3-quarter", num_experts=64, top_k=8, hidden_size=7168, intermediate_size=2048,
            activation=Activation(), has_bias=False, num_active={4: 26, 8: 42, 16: 56, 32: 63},
        ),
        LayerCase(  # on one of two tensor-parallel ranks
            model="deepseek-v3-quarter-tp2", num_experts=64, top_k=8, hidden_size=7168, intermediate_size=1024,
            activation=Activation(), has_bias=False, num_active={4: 26, 8: 42, 16: 56, 32: 63},
        ),
        LayerCase(
            model="deepseek-v3", num_experts=256, top_k=8, hidden_size=7168, intermediate_size=2048,
            activation=Activation(), has_bias=False, num_active={4: 30, 8: 57, 16: 102, 32: 163, 64: 222, 128: 252},
        ),
    )
}  # fmt: skip


def random_experts(case: LayerCase, format_name: str, device: torch.device, seed: int) -> ExpertWeights:
    """Weights whose outputs are of the order of one, made on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    sizes = (case.num_experts, case.hidden_size, case.intermediate_size)
    b13 = b2 = None
    if case.has_bias:
        b13 = torch.randn(case.num_experts, 2 * case.intermediate_size, generator=generator, device=device)
        b2 = torch.randn(case.num_experts, case.hidden_size, generator=generator, device=device)
    w13 = _random_weight(format_name, (sizes[0], 2 * sizes[2], sizes[1]), generator)
    w2 = _random_weight(format_name, sizes, generator)
    return ExpertWeights(w13=w13, w2=w2, b13=b13, b2=b2)


def _random_weight(format_name: str, shape: tuple[int, int, int], generator: torch.Generator) -> Weight:
    num_experts, num_rows, num_cols = shape
    device = generator.device

    def integers(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator, device=device, dtype=torch.uint8)

    if format_name == "mxfp4":  # codes have a mean square of 6.5, so 2^-7 makes a standard deviation of about 0.02
        scales = integers(119, 122, num_experts, num_rows, num_cols // 32)
        return Mxfp4Weight(integers(0, 255, num_experts, num_rows, num_cols // 2), scales)
    if format_name == "nvfp4":  # 0x30 .. 0x3f are 0.5 .. 1.875
        scales = integers(0x30, 0x40, num_experts, num_rows, num_cols // 16).view(torch.float8_e4m3fn)
        scale_2 = torch.full((num_experts,), 0.007, device=device)
        return Nvfp4Weight(integers(0, 255, num_experts, num_rows, num_cols // 2), scales, scale_2)
    if format_name == "bf16":
        dense = torch.empty(shape, device=device, dtype=torch.bfloat16)
        for matrix in dense:  # fp32 noise of a whole layer would not fit beside the copies
            matrix.copy_(torch.randn(num_rows, num_cols, generator=generator, device=device) * 0.02)
        return Bf16Weight(dense)
    blocks = (-(-num_rows // 128), -(-num_cols // 128))
    scale = 0.01 + 0.01 * torch.rand(num_experts, *blocks, generator=generator, device=device)
    data = torch.empty(shape, device=device, dtype=torch.float8_e4m3fn)
    for matrix in data:
        matrix.copy_(torch.randn(num_rows, num_cols, generator=generator, device=device) * 2)
    return Fp8BlockWeight(data, scale)


def routing(case: LayerCase, num_tokens: int, kind: str, device: torch.device, seed: int) -> StandardTopK:
    """A routing that touches exactly `case.active(num_tokens)` experts ("uniform"), or one with zipf popularity.

    Made on the CPU: the same seed gives the same ids everywhere. Weights are fp32 and sum to one.
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "zipf":
        popularity = 1.0 / torch.arange(1, case.num_experts + 1)
        popularity = popularity[torch.randperm(case.num_experts, generator=generator)]
        ids = torch.multinomial(popularity.expand(num_tokens, -1), case.top_k, generator=generator)
    else:
        ids = _exactly_active(case, num_tokens, generator)
    weights = torch.rand(num_tokens, case.top_k, generator=generator)
    weights /= weights.sum(-1, keepdim=True)
    return StandardTopK(weights.to(device), ids.to(torch.int32).to(device))


def id_sets(case: LayerCase, num_tokens: int, kind: str, device: torch.device, num_sets: int) -> list[StandardTopK]:
    """The routings that every contender of every run gets."""
    return [routing(case, num_tokens, kind, device, seed=100 + index) for index in range(num_sets)]


def _exactly_active(case: LayerCase, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Deal every chosen expert to one token, then fill up each token with others of the chosen ones."""
    num_active = case.active(num_tokens)
    chosen = torch.randperm(case.num_experts, generator=generator)[:num_active]
    rank = torch.rand(num_tokens, num_active, generator=generator)
    index = torch.arange(num_active)
    rank[index % num_tokens, index] = -1.0  # dealt experts come first
    return chosen[rank.argsort(dim=1)[:, : case.top_k]]
