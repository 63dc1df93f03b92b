"""Settings of the engine, checked when made. Knows no torch, so that the HTTP process stays light."""

from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineConfigError

_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("auto", "float32", "bfloat16"),
    "kv_cache_dtype": ("auto", "float32", "bfloat16"),
    "attention_backend": ("auto", "triton", "torch"),
    "deepep_mode": ("auto", "normal", "low_latency"),
    "router_logits_dtype": ("auto", "float32", "bfloat16"),
    "load_format": ("auto", "dummy"),
    "selfcheck": ("off", "first", "all"),
}
_LOWEST = {
    "max_num_seqs": 1,
    "page_size": 1,
    "deepep_max_dispatch_tokens": 1,
    "max_model_len": 2,  # a token of prompt and one of answer
    "max_num_batched_tokens": 1,
    "max_step_ms": 0,
    "num_pages": 1,
    "num_threads": 1,
}
_MAX_THREADS = 1024  # OpenMP crashes on numbers that are far too large


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine needs to know at start. A None is replaced by a value that fits the model and the device."""

    model: Path
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    dtype: str = "auto"  # of weights that are not quantized and of activations; auto: float32 on CPU, bfloat16 on CUDA
    moe_backend: str = "auto"
    moe_a2a_backend: str = "none"
    deepep_mode: str = "auto"  # kernels that move tokens: low latency for decode steps, normal for the rest, or one
    deepep_max_dispatch_tokens: int = 128  # tokens one rank sends in a low-latency step
    router_logits_dtype: str = "auto"
    max_model_len: int | None = None  # prompt and answer together, in tokens; None: what the model was made for
    max_num_seqs: int = 64  # requests that run at the same time
    max_num_batched_tokens: int | None = None  # tokens of one step; None: 512 on CPU, 8192 on CUDA
    max_step_ms: int | None = None  # target for steps that decode and read prompts; 0: none; None: 60
    max_queued_requests: int = 512  # requests that may wait for one of the `max_num_seqs` places
    page_size: int = 16  # tokens a KV page
    num_pages: int | None = None  # KV pages; None: from the memory there is
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory for weights, activations and KV pages
    kv_cache_dtype: str = "auto"  # auto: the model's dtype
    attention_backend: str = "auto"
    enforce_eager: bool = False  # launch decode kernels one by one instead of replaying a CUDA graph
    load_format: str = "auto"
    selfcheck: str = "first"
    tune: bool = False  # measure the experts' kernels while loading, under a minute; later starts use what was found
    tune_cache_dir: Path | None = None  # where it is kept and looked for; None: nowhere
    enable_prefix_caching: bool = True
    seed: int | None = None  # draws the seeds of requests that have none; None: from the system's entropy
    num_threads: int | None = None  # CPU threads of one step; None: all cores but one, which stays for the HTTP process

    def __post_init__(self) -> None:
        for field, known in _CHOICES.items():
            value = getattr(self, field)
            if value not in known:
                raise EngineConfigError(f"{field} is {value!r}: it must be one of {', '.join(known)}")
        if self.device not in ("auto", "cpu", "cuda") and not (
            self.device.startswith("cuda:") and self.device[5:].isdigit()
        ):
            raise EngineConfigError(f"device is {self.device!r}: it must be auto, cpu, cuda or cuda:N")
        for field, lowest in _LOWEST.items():
            value = getattr(self, field)
            if value is not None and value < lowest:
                raise EngineConfigError(f"{field} is {value}: it must be at least {lowest}")
        if self.num_threads is not None and self.num_threads > _MAX_THREADS:
            raise EngineConfigError(f"num_threads is {self.num_threads}: it must be at most {_MAX_THREADS}")
        if self.max_queued_requests < 0:
            raise EngineConfigError(f"max_queued_requests is {self.max_queued_requests}: it must not be negative")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise EngineConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}: it must be above 0 and at most 1"
            )
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise EngineConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}: it must be at least max_num_seqs "
                f"{self.max_num_seqs}, one token for every running request"
            )

    @property
    def max_requests(self) -> int:
        """Requests the engine holds at most, running and queued; more are refused at once."""
        return self.max_num_seqs + self.max_queued_requests
