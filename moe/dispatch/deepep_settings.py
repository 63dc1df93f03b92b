"""DeepEP's limits, checked without library, GPU or weights. Every error names the flag and the numbers.

The limits are those of DeepEP 1.2.1 and of the legacy buffer of 2.x (commit dd758ca, 2026-07-14). LL is its low-latency
mode. Only the library knows its queue depth, so that limit is checked once the buffer exists.
"""

import enum
from dataclasses import dataclass
from typing import Self

from moe.config import DispatchFormat, MoeRunnerConfig
from moe.errors import MoeConfigError, UnsupportedPathError

LL_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)  # the kernels are compiled for these only
LL_MAX_TOKENS = 1024
LL_MAX_TOP_K = 11
NORMAL_MAX_TOP_K = 32
LL_MAX_LOCAL_EXPERTS = 1024
INTRANODE_RANKS = (2, 4, 8)
INTERNODE_NODES = (2, 3, 4, 6, 8, 12, 16, 18, 20)
RANKS_PER_NODE = 8
FP8_GROUP = 128
QUEUE_DEPTH_VARIABLE = "NVSHMEM_QP_DEPTH"  # the only way to tell deep_ep
DEFAULT_QUEUE_DEPTH = 1024
_TOKENS_FLAG, _EP_FLAG, _MODE_FLAG = "--deepep-max-dispatch-tokens", "--expert-parallel-size", "--deepep-mode"


class DeepepMode(enum.StrEnum):
    """Which kernels move the tokens; `auto` uses low latency for decode steps and normal mode for all others."""

    AUTO = "auto"
    NORMAL = "normal"
    LOW_LATENCY = "low_latency"

    @property
    def has_normal(self) -> bool:
        """True if normal kernels may run."""
        return self is not DeepepMode.LOW_LATENCY

    @property
    def has_low_latency(self) -> bool:
        """True if low-latency kernels may run."""
        return self is not DeepepMode.NORMAL

    @property
    def dispatch_formats(self) -> tuple[DispatchFormat, ...]:
        """Layouts that the runner must support: the argument for `MoeRunner(dispatch_formats=...)`."""
        normal = (DispatchFormat.DEEPEP_NORMAL,) if self.has_normal else ()
        low_latency = (DispatchFormat.DEEPEP_LL,) if self.has_low_latency else ()
        return normal + low_latency


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepepSettings:
    """Settings of DeepEP. `max_dispatch_tokens`: the most tokens that one rank sends in a low-latency step.

    `overlaps_down_gemm`: in low latency, a layer's combine runs beside the experts' second GEMM.

    `check_deepep` checks the limits when a transport is built. Without a transport the settings have no effect.
    """

    mode: DeepepMode = DeepepMode.AUTO
    max_dispatch_tokens: int = 128
    overlaps_down_gemm: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EpShape:
    """What the ranks of one expert-parallel group share."""

    hidden_size: int
    num_experts: int
    top_k: int
    ep_size: int
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.tp_size != 1:
            raise UnsupportedPathError(
                f"--tensor-parallel-size of the experts is {self.tp_size}: a transport completes the sum over "
                f"expert-parallel ranks only; use 1, or --moe-a2a-backend none"
            )
        if self.num_experts % self.ep_size:
            raise MoeConfigError(f"{_EP_FLAG} is {self.ep_size}: it must divide the {self.num_experts} experts")

    @classmethod
    def of(cls, config: MoeRunnerConfig) -> Self:
        """The shape from a layer's settings."""
        return cls(
            hidden_size=config.hidden_size,
            num_experts=config.num_experts,
            top_k=config.top_k,
            ep_size=config.place.ep_size,
            tp_size=config.place.tp_size,
        )

    @property
    def num_local_experts(self) -> int:
        """Experts on each rank."""
        return self.num_experts // self.ep_size


def check_deepep(settings: DeepepSettings, shape: EpShape, *, sends_fp8: bool, row_multiple: int = 4) -> None:
    """Raise UnsupportedPathError or MoeConfigError for a shape that DeepEP's kernels do not support.

    `row_multiple`: the rows per expert in low latency must be a multiple of this (`Backend.row_multiple`).
    """
    if sends_fp8 and shape.hidden_size % FP8_GROUP:
        raise UnsupportedPathError(
            f"hidden size {shape.hidden_size}: an fp8 dispatch needs a multiple of {FP8_GROUP}; use a --moe-backend "
            "that takes bf16"
        )
    if settings.mode.has_normal:
        _check_normal(shape)
    if settings.mode.has_low_latency:
        _check_low_latency(settings, shape, row_multiple)


def _check_normal(shape: EpShape) -> None:
    num_nodes, rest = divmod(shape.ep_size, RANKS_PER_NODE)
    if shape.ep_size not in INTRANODE_RANKS and (rest or num_nodes not in INTERNODE_NODES):
        raise UnsupportedPathError(
            f"{_EP_FLAG} is {shape.ep_size}: {_MODE_FLAG} normal runs on {_words(INTRANODE_RANKS)} ranks of one node "
            f"or on {_words(INTERNODE_NODES)} nodes of {RANKS_PER_NODE}"
        )
    if shape.top_k > NORMAL_MAX_TOP_K:
        raise UnsupportedPathError(f"top_k is {shape.top_k}: {_MODE_FLAG} normal takes at most {NORMAL_MAX_TOP_K}")
    if shape.hidden_size % 8:
        raise UnsupportedPathError(
            f"hidden size {shape.hidden_size}: {_MODE_FLAG} normal moves 16 bytes at a time and needs a multiple of 8"
        )


def queue_depth_to_ask_for(settings: DeepepSettings) -> int | None:
    """Depth of DeepEP's send queues that the token limit needs; None if the default is enough."""
    needed = 2 * (settings.max_dispatch_tokens + 1)
    if not settings.mode.has_low_latency or needed <= DEFAULT_QUEUE_DEPTH:
        return None
    return 1 << (needed - 1).bit_length()  # NVSHMEM's queues are powers of two


def check_queue_depth(settings: DeepepSettings, queue_depth: int | None) -> None:
    """Refuse a token limit that would overrun DeepEP's send queue; the library does not check.

    `queue_depth`: work requests that one queue of the buffer holds; None if the library has no such limit.

    Raises:
        MoeConfigError: a low-latency step needs a deeper queue.
    """
    tokens = settings.max_dispatch_tokens
    needed = 2 * (tokens + 1)
    if queue_depth is None or not settings.mode.has_low_latency or queue_depth >= needed:
        return
    raise MoeConfigError(
        f"{_TOKENS_FLAG} is {tokens}: that needs a queue depth of {needed}, but deep_ep uses {queue_depth}; start with "
        f"{QUEUE_DEPTH_VARIABLE}={needed} in the environment, which deep_ep reads, or use at most "
        f"{queue_depth // 2 - 1} tokens"
    )


def _check_low_latency(settings: DeepepSettings, shape: EpShape, row_multiple: int) -> None:
    tokens = settings.max_dispatch_tokens
    if not 1 <= tokens <= LL_MAX_TOKENS:
        raise MoeConfigError(f"{_TOKENS_FLAG} is {tokens}: it must lie in 1..{LL_MAX_TOKENS}")
    if shape.ep_size >= RANKS_PER_NODE and shape.ep_size % RANKS_PER_NODE:
        raise UnsupportedPathError(
            f"{_EP_FLAG} is {shape.ep_size}: {_MODE_FLAG} low_latency takes fewer than {RANKS_PER_NODE} ranks or a "
            f"multiple of {RANKS_PER_NODE}"
        )
    if shape.top_k > LL_MAX_TOP_K:
        raise UnsupportedPathError(f"top_k is {shape.top_k}: {_MODE_FLAG} low_latency takes at most {LL_MAX_TOP_K}")
    if shape.num_local_experts > LL_MAX_LOCAL_EXPERTS:
        raise UnsupportedPathError(
            f"{_EP_FLAG} is {shape.ep_size}: {shape.num_local_experts} experts a rank, {_MODE_FLAG} low_latency takes "
            f"at most {LL_MAX_LOCAL_EXPERTS}"
        )
    num_rows = shape.ep_size * tokens
    if num_rows % row_multiple:
        raise MoeConfigError(
            f"{_TOKENS_FLAG} is {tokens}: times {shape.ep_size} ranks it must be a multiple of "
            f"{row_multiple}, for the layout of the scales, but is {num_rows}"
        )
    ll_hidden_size(shape.hidden_size)


def ll_hidden_size(hidden_size: int) -> int:
    """Columns that low-latency kernels send for `hidden_size`: the next compiled size (2880 -> 3072)."""
    for size in LL_HIDDEN_SIZES:
        if size >= hidden_size:
            return size
    raise UnsupportedPathError(
        f"hidden size {hidden_size}: {_MODE_FLAG} low_latency is compiled for {_words(LL_HIDDEN_SIZES)}"
    )


def why_not_capturable(settings: DeepepSettings, max_num_tokens: int) -> str | None:
    """Why CUDA graphs cannot hold decode steps of `max_num_tokens` tokens a rank, with a remedy; None if they can."""
    if not settings.mode.has_low_latency:
        return (
            f"{_MODE_FLAG} normal cannot run in CUDA graphs, since it waits for counts on the host; use auto or "
            "low_latency"
        )
    if max_num_tokens > settings.max_dispatch_tokens:
        return (
            f"{_TOKENS_FLAG} is {settings.max_dispatch_tokens}, but graphs are captured for up to {max_num_tokens} "
            "tokens: raise it to at least that number"
        )
    return None


def expected_rows(num_tokens: int, shape: EpShape) -> int:
    """Rows per local expert if every rank sends `num_tokens` and routing is even, rounded up."""
    return (num_tokens * shape.ep_size * shape.top_k + shape.num_experts) // shape.num_experts


def most_received_rows(settings: DeepepSettings, shape: EpShape) -> int:
    """The most rows that all local experts together can get in a low-latency step: no token has an expert twice."""
    num_slots = min(shape.top_k, shape.num_local_experts)
    return shape.ep_size * settings.max_dispatch_tokens * num_slots


def _words(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
