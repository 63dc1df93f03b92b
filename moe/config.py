"""Settings of one MoE layer: enums and frozen records. No tensors, no devices."""

import enum
from dataclasses import dataclass

import torch

from moe.errors import MoeConfigError
from moe.geometry import ExpertShape, RankPlace

_ALONE = RankPlace()


class MoeBackend(enum.StrEnum):
    """Who computes the experts."""

    AUTO = "auto"
    TORCH = "torch"
    TRITON = "triton"
    FLASHINFER_MXFP4 = "flashinfer_mxfp4"
    FLASHINFER_CUTLASS = "flashinfer_cutlass"
    FLASHINFER_CUTEDSL = "flashinfer_cutedsl"
    FLASHINFER_TRTLLM = "flashinfer_trtllm"
    DEEP_GEMM = "deep_gemm"
    AITER = "aiter"


class DispatchFormat(enum.StrEnum):
    """Layout in which a transport hands tokens to the experts."""

    STANDARD = "standard"
    DEEPEP_NORMAL = "deepep_normal"
    DEEPEP_LL = "deepep_ll"
    MORI_NORMAL = "mori_normal"
    MORI_LL = "mori_ll"
    FLASHINFER = "flashinfer"


class DispatchDtype(enum.StrEnum):
    """Number format of dispatched tokens."""

    BF16 = "bf16"
    FP8 = "fp8"  # e4m3 with an fp32 scale per 128 columns
    FP8_UE8M0 = "fp8_ue8m0"  # the same with scales rounded up to powers of two
    NVFP4 = "nvfp4"  # packed E2M1, e4m3 scales per 16, under the layer's global scale

    @property
    def is_fp8(self) -> bool:
        """True for both FP8 formats."""
        return self in (DispatchDtype.FP8, DispatchDtype.FP8_UE8M0)


class MoeA2ABackend(enum.StrEnum):
    """Who moves tokens between expert-parallel ranks."""

    NONE = "none"
    DEEPEP = "deepep"
    MORI = "mori"
    FLASHINFER = "flashinfer"
    MOONCAKE = "mooncake"
    NIXL = "nixl"

    @property
    def dispatch_formats(self) -> tuple[DispatchFormat, ...]:
        """Every layout this transport can produce; `--deepep-mode` may restrict them."""
        return _DISPATCH_FORMATS[self]

    @property
    def supports_aiter(self) -> bool:
        """True for transports whose layouts aiter's permutes accept."""
        return self is not MoeA2ABackend.FLASHINFER


_DISPATCH_FORMATS: dict[MoeA2ABackend, tuple[DispatchFormat, ...]] = {
    MoeA2ABackend.NONE: (DispatchFormat.STANDARD,),
    MoeA2ABackend.DEEPEP: (DispatchFormat.DEEPEP_NORMAL, DispatchFormat.DEEPEP_LL),
    MoeA2ABackend.MORI: (DispatchFormat.MORI_NORMAL, DispatchFormat.MORI_LL),
    MoeA2ABackend.FLASHINFER: (DispatchFormat.FLASHINFER,),
    MoeA2ABackend.MOONCAKE: (DispatchFormat.DEEPEP_LL,),
    MoeA2ABackend.NIXL: (DispatchFormat.DEEPEP_LL,),
}


class RoutingMethod(enum.StrEnum):
    """How router logits become expert ids and weights."""

    SOFTMAX_AFTER_TOPK = "softmax_after_topk"  # GPT-OSS
    SIGMOID_GROUPED = "sigmoid_grouped"  # DeepSeek-V3: correction bias, group-limited
    SQRT_SOFTPLUS = "sqrt_softplus"  # DeepSeek-V4: correction bias, no groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation:
    """Gated activation `g * sigmoid(alpha * g) * (u + beta)` with `g = min(gate, limit)`, `u = clamp(up, ±limit)`.

    The defaults are plain SwiGLU (DeepSeek-V3). GPT-OSS: alpha 1.702, beta 1, limit 7. DeepSeek-V4: limit 10.
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and not self.limit > 0:
            raise MoeConfigError(f"activation limit is {self.limit}: it must be positive, or None for no clamp")

    @property
    def is_plain(self) -> bool:
        """True for `silu(gate) * up` without any clamp or offset."""
        return self == Activation()


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingConfig:
    """How `moe.routing.route` chooses experts. It applies `routed_scaling_factor`; nothing else does."""

    method: RoutingMethod
    num_experts: int
    top_k: int
    num_groups: int = 1
    num_kept_groups: int = 1
    normalize: bool = True
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise MoeConfigError(f"top_k is {self.top_k}: it must lie between 1 and num_experts {self.num_experts}")
        if self.num_experts % self.num_groups:
            raise MoeConfigError(f"num_groups is {self.num_groups}: it must divide num_experts {self.num_experts}")
        if not 1 <= self.num_kept_groups <= self.num_groups:
            raise MoeConfigError(
                f"num_kept_groups is {self.num_kept_groups}: it must lie between 1 and num_groups {self.num_groups}"
            )
        num_candidates = self.num_kept_groups * (self.num_experts // self.num_groups)
        if self.top_k > num_candidates:
            raise MoeConfigError(f"top_k is {self.top_k}: the kept groups hold only {num_candidates} experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeRunnerConfig:
    """Arithmetic of one MoE layer, its shape over all ranks, and this rank's place.

    `scale_block`: elements of the intermediate axis that share a scale (`Weight.col_block` of the experts' format).
    Ranks are cut between such blocks.
    """

    shape: ExpertShape
    place: RankPlace = _ALONE
    scale_block: int = 1
    activation: Activation = Activation()
    has_biases: bool = False  # both matrices of an expert have one
    dtype: torch.dtype = torch.bfloat16
    routing: RoutingConfig | None = None
    max_num_tokens: int = 8192  # most tokens in one call; some kernels allocate for this many
    num_layers_left: int = 1  # MoE layers whose experts are still to be prepared, this one included
    no_combine: bool = False
    apply_router_weight_on_input: bool = False

    def __post_init__(self) -> None:
        for field in ("scale_block", "max_num_tokens", "num_layers_left"):
            if getattr(self, field) < 1:
                raise MoeConfigError(f"{field} is {getattr(self, field)}: it must be at least 1")
        self.place.expert_range(self.num_experts)
        for field in ("num_experts", "top_k"):
            ours, routed = getattr(self.shape, field), getattr(self.routing or self.shape, field)
            if ours != routed:
                raise MoeConfigError(f"{field} is {ours} in the layer's shape but {routed} in its routing")
        if self.apply_router_weight_on_input and self.top_k != 1:
            raise MoeConfigError(
                f"apply_router_weight_on_input needs top_k 1, got {self.top_k}: one input cannot carry several weights"
            )

    @property
    def num_experts(self) -> int:
        """Experts of the whole layer."""
        return self.shape.num_experts

    @property
    def top_k(self) -> int:
        """Experts of one token, over all ranks."""
        return self.shape.top_k

    @property
    def hidden_size(self) -> int:
        """H, the same on every rank."""
        return self.shape.hidden_size

    @property
    def num_local_experts(self) -> int:
        """Experts of this rank."""
        return len(self.place.expert_range(self.num_experts))

    @property
    def intermediate_size(self) -> int:
        """I of every rank's buffers: its share in whole scale blocks, including padding."""
        return self.place.cut(self.shape.intermediate_size, self.scale_block).padded
