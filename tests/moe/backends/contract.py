"""What the contract needs to know of a path: one backend with one number format on one device, its library emulated.

A new backend adds its paths to PATHS and its refusals to LIMITS; `test_contract.py` then runs every check for it.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from moe import Activation, MoeA2ABackend, MoeBackend, MoeRunner, MoeRunnerConfig, StandardDispatchOutput, Topology
from moe.check.reference import reference_moe
from moe.config import RoutingConfig, RoutingMethod
from moe.formats import ExpertWeights
from moe.registry import load_backend
from moe.routing import BypassedTopK, StandardTopK, TopKOutput, route
from tests.emulators.aiter import install_aiter
from tests.emulators.cutedsl import install_cutedsl
from tests.emulators.cutlass import install_cutlass
from tests.emulators.deep_gemm import install_deep_gemm
from tests.emulators.trtllm import install_trtllm
from tests.moe.backends import deep_gemm_cases, hostile
from tests.moe.moe_layers import DEEPSEEK_V4, GPT_OSS, PLAIN

E, K, T = 8, 3, 23
NONE = MoeA2ABackend.NONE
TORCH, TRITON, DEEP_GEMM, AITER = MoeBackend.TORCH, MoeBackend.TRITON, MoeBackend.DEEP_GEMM, MoeBackend.AITER
CUTLASS, TRTLLM = MoeBackend.FLASHINFER_CUTLASS, MoeBackend.FLASHINFER_TRTLLM
CUTEDSL, MXFP4 = MoeBackend.FLASHINFER_CUTEDSL, MoeBackend.FLASHINFER_MXFP4
EXACT, QUANTIZED = 1e-5, 1e-3  # both sides compute in fp32; both sides quantize activations alike
SOFTMAX = RoutingConfig(
    method=RoutingMethod.SOFTMAX_AFTER_TOPK, num_experts=E, top_k=K, routed_scaling_factor=hostile.FACTOR
)
GROUPED = RoutingConfig(
    method=RoutingMethod.SIGMOID_GROUPED, num_experts=E, top_k=K, num_groups=4, num_kept_groups=2,
    routed_scaling_factor=hostile.FACTOR,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Path:
    """`block`: shards of the intermediate axis are multiples of it; `num_blocks`: of the layer's axis."""

    backend: MoeBackend
    format_name: str
    arch: str
    tolerance: float
    block: int = 128
    num_blocks: int = 4
    hidden: int = 256
    activation: Activation = PLAIN
    has_biases: bool = False
    counts: tuple[int, ...] = (T,)
    a2a: MoeA2ABackend = NONE  # another one than none only in tests of a backend's own

    @property
    def is_flashinfer(self) -> bool:
        return self.backend.startswith("flashinfer")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.backend is TORCH else torch.bfloat16

    def __str__(self) -> str:
        return f"{self.backend}-{self.format_name}-{self.arch}-{'biased' if self.has_biases else 'plain'}"


PATHS = (
    *(Path(TORCH, name, "cpu", EXACT, block) for name, block in
      (("bf16", 32), ("fp8_block", 128), ("fp8_tensor", 32), ("nvfp4", 16))),
    Path(TORCH, "mxfp4", "cpu", EXACT, 32, 9, 96, GPT_OSS, True),
    # the longer batch takes the contiguous kernel
    Path(DEEP_GEMM, "fp8_block", "sm90", deep_gemm_cases.QUANTIZED, activation=DEEPSEEK_V4, counts=(T, 300)),
    Path(DEEP_GEMM, "fp8_block", "sm100", deep_gemm_cases.QUANTIZED, activation=DEEPSEEK_V4, counts=(T, 300)),
    Path(AITER, "bf16", "gfx942", EXACT, 32),
    *(Path(AITER, name, arch, QUANTIZED) for name in ("fp8_block", "fp8_tensor") for arch in ("gfx942", "gfx950")),
    Path(AITER, "mxfp4", "gfx950", QUANTIZED, 256),
    Path(AITER, "mxfp4", "gfx950", EXACT, 32, 9, 192, GPT_OSS, True),
    Path(CUTLASS, "bf16", "sm90", EXACT, activation=GPT_OSS, has_biases=True),
    Path(CUTLASS, "bf16", "sm90", EXACT),
    Path(CUTLASS, "fp8_block", "sm90", QUANTIZED),
    Path(CUTLASS, "fp8_tensor", "sm90", QUANTIZED),
    Path(CUTLASS, "nvfp4", "sm100", QUANTIZED),
    *(Path(TRTLLM, name, "sm100", QUANTIZED) for name in ("fp8_block", "fp8_tensor", "nvfp4")),
    Path(CUTEDSL, "nvfp4", "sm100", QUANTIZED, 64),
    *(Path(MXFP4, "mxfp4", arch, EXACT, 32, 9, 192, GPT_OSS, True) for arch in ("sm90", "sm100")),
    *(Path(MXFP4, "mxfp4", arch, EXACT, activation=DEEPSEEK_V4) for arch in ("sm90", "sm100")),
)  # fmt: skip


def path_of(backend: MoeBackend, **traits: Any) -> Path:
    """The first path of a backend that has these traits."""
    paths = (path for path in PATHS if path.backend is backend)
    return next(path for path in paths if all(getattr(path, name) == trait for name, trait in traits.items()))


def install(patch: pytest.MonkeyPatch, backend: MoeBackend, arch: str) -> Any:
    """The emulated library on a device of this architecture; None for torch."""
    if backend is AITER:
        return install_aiter(patch, arch)
    if backend is DEEP_GEMM:
        # nothing but the quantization rounds: this emulator has no unrounded result
        patch.setattr("moe.backends.deep_gemm.backend.RESULT_DTYPE", torch.float32)
        return install_deep_gemm(patch, arch, wide=True)
    if backend is CUTEDSL:
        return install_cutedsl(patch)
    if backend is TRTLLM or (backend is MXFP4 and arch == "sm100"):
        return install_trtllm(patch)
    return install_cutlass(patch, *divmod(int(arch[2:]), 10)) if backend.startswith("flashinfer") else None


def tokens(path: Path, num_tokens: int = T) -> torch.Tensor:
    """[T, H]; large where a clamp must act on them."""
    size = 3.0 if path.activation.limit is None else 6.0 if path.has_biases else 9.0
    return hostile.tokens(num_tokens, path.hidden, size=size).to(path.dtype)


TOPK = hostile.routing(T, E, K)


@functools.cache
def make_experts(path: Path, num_blocks: int | None = None) -> ExpertWeights:
    """Of the whole layer; static activation scales where FlashInfer's kernels need them."""
    inter, name = path.block * (num_blocks or path.num_blocks), path.format_name
    if path.is_flashinfer and name in hostile.ROUNDING:
        return hostile.quantized_experts(name, E, path.hidden, inter, x=tokens(path))
    size = 2.0 if (name, path.has_biases) == ("bf16", True) else 1.0
    return hostile.plain_experts(name, E, path.hidden, inter, has_biases=path.has_biases, size=size)


def config_of(
    path: Path, experts: ExpertWeights, topology: Topology, routing: RoutingConfig | None = None
) -> MoeRunnerConfig:
    return hostile.make_config(
        E, experts.hidden_size, experts.intermediate_size, K, place=topology, activation=path.activation,
        dtype=path.dtype, has_biases=path.has_biases, routing=routing,
    )  # fmt: skip


@functools.cache
def bypassed(rules: RoutingConfig, dtype: torch.dtype = torch.bfloat16) -> BypassedTopK:
    """Logits of T tokens that fit bf16, for kernels that route; some rules take a correction bias, which fits too."""
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(5)).bfloat16().to(dtype)
    bias = (torch.arange(E) * 0.0625 - 0.25).flip(0)
    return BypassedTopK(logits, rules, bias if rules.method is RoutingMethod.SIGMOID_GROUPED else None)


def routed(topk: BypassedTopK) -> StandardTopK:
    """What a kernel makes of it that keeps its weights in bf16."""
    standard = route(topk.logits, topk.config, topk.correction_bias)
    return StandardTopK(standard.weights.bfloat16().float(), standard.ids)


def prepare(
    path: Path, experts: ExpertWeights, topology: Topology, routing: RoutingConfig | None = None
) -> Callable[[torch.Tensor, TopKOutput], Any]:
    """Runs one rank's layer: (tokens, routing) -> the runner's result."""
    config = config_of(path, experts, topology, routing)
    info = load_backend(path.backend).prepare(experts, config, topology)
    runner = MoeRunner(path.backend, NONE, config)
    return lambda x, topk: runner.run(StandardDispatchOutput(x, topk), info)


def exact(path: Path, emulator: Any, result: Any) -> torch.Tensor:
    """What the kernel computed, before it was rounded to bf16 and without padding."""
    unrounded = getattr(emulator, "exact", None)
    return (result.hidden_states if unrounded is None else unrounded)[:, : path.hidden].float()


def shard(path: Path, experts: ExpertWeights, topology: Topology) -> ExpertWeights:
    """The part of one rank, which knows the layer's activation scales."""
    tp, ep = (topology.tp_size, topology.tp_rank), (topology.ep_size, topology.ep_rank)
    return hostile.with_layer_scales(hostile.shard(experts, tp=tp, ep=ep, block=path.block), experts)


def run_ranks(
    path: Path, x: torch.Tensor, topk: TopKOutput, tp_size: int, ep_size: int
) -> Iterator[tuple[Topology, ExpertWeights, Any]]:
    """Each rank's place, experts and result. A rank knows that it is one of several."""
    whole = make_experts(path)
    for number in range(tp_size * ep_size):
        topology = Topology(tp_size=tp_size, tp_rank=number % tp_size, ep_size=ep_size, ep_rank=number // tp_size)
        local = shard(path, whole, topology)
        result = prepare(path, local, topology)(x, topk)
        assert result.is_partial, "exactly one place reduces, and knows when"
        yield topology, local, result


def sum_of_ranks(path: Path, emulator: Any, x: torch.Tensor, topk: TopKOutput, tp: int, ep: int) -> torch.Tensor:
    """fp32 [T, H] of all ranks together."""
    return sum(exact(path, emulator, result).clone() for _, _, result in run_ranks(path, x, topk, tp, ep))


def expected(path: Path, x: torch.Tensor, topk: StandardTopK, experts: ExpertWeights, first: int = 0) -> torch.Tensor:
    """fp32 [T, H] of the reference, which rounds activations where the kernels do."""
    if path.backend is DEEP_GEMM:
        return deep_gemm_cases.twin(x, topk, experts, path.arch, path.activation)
    if path.is_flashinfer:
        return hostile.reference(x, topk, hostile.layer_wide(experts), path.activation)
    backend = load_backend(path.backend)
    support = backend.known_format(path.format_name, config_of(path, experts, Topology()))
    quantize = None if path.activation is GPT_OSS else support.activation_quant
    return reference_moe(x, topk, experts, path.activation, quantize_input=quantize, first_expert=first)


@functools.cache
def expected_once(path: Path, topk: TopKOutput = TOPK) -> torch.Tensor:
    """Of the whole layer; to be asked before a fault is planted, which in shared code could move both sides."""
    return expected(path, tokens(path), routed(topk) if isinstance(topk, BypassedTopK) else topk, make_experts(path))


def splits_a_token_scale(path: Path) -> bool:
    """aiter scales a token by the columns that the rank has, so its ranks add up to something else than one rank."""
    return path.backend is AITER and path.format_name == "fp8_tensor"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a backend refuses. `wrong_arch`: (format, device); `wrong_size`: (format, hidden, intermediate)."""

    transports: set[MoeA2ABackend] | set[str]
    installed_on: str
    wrong_arch: tuple[str, str]
    wrong_format: str
    wrong_size: tuple[str, int, int] | None
    no_biases: str | None
    only_plain: str | None


LIMITS: dict[MoeBackend, Limits] = {
    DEEP_GEMM: Limits({"none", "deepep", "mooncake", "nixl"}, "sm90", ("fp8_block", "sm80"), "bf16",
                      ("fp8_block", 256, 64), "fp8_block", None),
    AITER: Limits(set(MoeA2ABackend) - {MoeA2ABackend.FLASHINFER}, "gfx950", ("mxfp4", "gfx942"), "nvfp4",
                  ("mxfp4", 256, 128), "bf16", "bf16"),
    CUTLASS: Limits({"none"}, "sm90", ("nvfp4", "sm90"), "mxfp4",
                    ("fp8_block", 192, 256), "fp8_block", "fp8_block"),
    TRTLLM: Limits({"none"}, "sm100", ("nvfp4", "sm90"), "bf16",
                   ("fp8_block", 192, 256), "fp8_block", "nvfp4"),
    CUTEDSL: Limits({"none", "flashinfer", "deepep"}, "sm100", ("nvfp4", "sm90"), "bf16",
                    ("nvfp4", 256, 96), "nvfp4", "nvfp4"),
    MXFP4: Limits({"none"}, "sm90", ("mxfp4", "sm80"), "bf16", ("mxfp4", 256, 96), None, None),
}  # fmt: skip
