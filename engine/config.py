"""Settings of the engine, checked when made. Knows no torch, so that the HTTP process stays light."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engine.errors import EngineConfigError
from engine.logs import LogFormat
from engine.setting import check_settings, described, setting

Dtype = Literal["auto", "float32", "bfloat16"]
# The enums in `moe.config` have the same names; importing them would import torch.
MoeBackendName = Literal[
    "auto",
    "torch",
    "triton",
    "flashinfer_mxfp4",
    "flashinfer_cutlass",
    "flashinfer_cutedsl",
    "flashinfer_trtllm",
    "deep_gemm",
    "aiter",
]
MoeA2ABackendName = Literal["none", "deepep", "mori", "flashinfer", "mooncake", "nixl"]
_EXPERTS: Literal["mixture of experts"] = "mixture of experts"
_RANKS: Literal["several ranks"] = "several ranks"
_MAX_RANKS = 4096


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine needs to know at start. A None is replaced by a value that fits the model and the device."""

    model: Path = field(
        metadata=described(
            "model",
            "folder of the checkpoint, name of a bundled model, or OWNER/NAME on the Hugging Face hub",
            default_text="the bundled model",
        )
    )
    load_format: Literal["auto", "dummy"] = setting(
        "auto", "model", "auto reads the checkpoint; dummy makes random weights"
    )
    dtype: Dtype = setting(
        "auto",
        "model",
        "dtype of activations and of weights that are not quantized; auto is float32 on a CPU and bfloat16 on a GPU",
    )
    max_model_len: int | None = setting(
        None,
        "model",
        "tokens a request may have, prompt and answer together",
        default_text="what the model was made for",
        low=2,  # a token of prompt and one of answer
    )

    log_format: LogFormat = setting(
        "text", "HTTP", "log lines as text, or as JSON with the ids of requests, in all processes"
    )
    device: str = setting("auto", "engine", "auto, cpu, cuda or cuda:N")
    max_num_seqs: int = setting(
        64, "engine", "requests that run at the same time, on each data-parallel rank", low=1, high=100_000
    )
    max_queued_requests: int = setting(
        512, "engine", "requests that may wait, for each data-parallel rank; more are refused with 429", low=0
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "engine",
        "tokens of one step",
        default_text="512 on a CPU, 8192 on a GPU, 4096 on several with graphs and without a transport",
        low=1,
        high=2**24,
    )
    max_step_ms: int | None = setting(
        None,
        "engine",
        "target time in ms of a step that reads prompts while others decode; 0 for none",
        default_text="60",
        low=0,
    )
    page_size: int = setting(16, "engine", "tokens of a KV cache page", low=1, high=2**20)
    num_pages: int | None = setting(
        None,
        "engine",
        "KV cache pages of each rank, page_size tokens in every layer; more fit where layers have sliding windows",
        default_text="what fits in memory",
        low=1,
    )
    gpu_memory_utilization: float = setting(
        0.9, "engine", "share of the GPU's memory for weights, activations and KV cache", above=0, high=1
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "fp8"] = setting(
        "auto",
        "engine",
        "dtype of the KV cache; auto is the model's; fp8 (E4M3, no scales) holds twice the tokens of bfloat16",
    )
    attention_backend: Literal["auto", "flashinfer", "triton", "torch"] = setting(
        "auto",
        "engine",
        "who computes attention; flashinfer: of DeepSeek-V3 (MLA) with a bf16 cache, on Hopper or newer",
    )
    enforce_eager: bool = setting(False, "engine", "serve without CUDA graphs: slower, starts sooner, easier to debug")
    overlap: bool | None = setting(
        None,
        "engine",
        "launch a step while the one before is computed, instead of waiting for its tokens",
        default_text="on for a GPU",
    )
    step_timeout: float = setting(
        300.0, "engine", "seconds that a step may take, compiling its kernels included, before the engine ends", above=0
    )
    enable_prefix_caching: bool = setting(True, "engine", "keep KV pages of prompts for requests that begin the same")
    max_grammar_bytes: int = setting(
        1_048_576,
        "engine",
        "size of the JSON schema or grammar that an answer must follow; larger ones are refused",
        low=1,
    )
    grammar_timeout: float = setting(
        10.0,
        "engine",
        "seconds that compiling a JSON schema or grammar may take before its request is refused",
        above=0,
    )
    grammar_cache_mib: int = setting(
        256, "engine", "MiB of compiled grammars that are kept for requests to come", low=0, high=2**20
    )
    profile_dir: Path | None = setting(
        None,
        "engine",
        "folder for traces of torch's profiler, between POST /start_profile and POST /stop_profile",
        default_text="none: both are refused",
    )
    seed: int | None = setting(
        None, "engine", "makes requests without a seed repeatable", default_text="random", low=-(2**63), high=2**63 - 1
    )
    num_threads: int | None = setting(
        None,
        "engine",
        "CPU threads of one step; by default a core stays free for the HTTP process",
        default_text="all usable cores but one",
        low=1,
        high=1024,  # OpenMP crashes on numbers that are far too large
    )

    moe_backend: MoeBackendName = setting("auto", _EXPERTS, "who computes the experts")
    moe_a2a_backend: MoeA2ABackendName = setting("none", _EXPERTS, "who moves tokens between expert-parallel ranks")
    deepep_mode: Literal["auto", "normal", "low_latency"] = setting(
        "auto",
        _EXPERTS,
        "kernels of the transports that have two kinds; auto takes low_latency for decode steps, normal for the rest",
    )
    deepep_max_dispatch_tokens: int = setting(
        128, _EXPERTS, "tokens one rank sends in a low-latency step", low=1, high=2**20
    )
    enable_single_batch_overlap: bool = setting(
        False,
        _EXPERTS,
        "send each result row of the experts once their second GEMM has signalled it; with deepep in low latency and "
        "flashinfer_cutedsl or deep_gemm",
    )
    router_logits_dtype: Dtype = setting(
        "auto", _EXPERTS, "dtype of router logits; auto is what the expert backend wants"
    )
    selfcheck: Literal["auto", "off", "first", "all"] = setting(
        "auto",
        _EXPERTS,
        "MoE layers compared with plain torch while loading; auto is all of them on a GPU, the first on a CPU",
    )
    expert_load: bool = setting(
        False, _EXPERTS, "count the tokens of every expert, for /metrics, GET /expert_load and moe-serve experts"
    )
    enable_eplb: bool = setting(
        False,
        _EXPERTS,
        "give busy experts replicas and move experts between expert-parallel ranks, so that each gets as many tokens",
    )
    num_redundant_experts: int | None = setting(
        None,
        _EXPERTS,
        "replicas in a layer, with enable_eplb; a multiple of expert_parallel_size",
        default_text="one for each expert-parallel rank",
        low=0,
        high=2**16,
    )
    eplb_interval: int = setting(
        1000,
        _EXPERTS,
        "steps from one placement of the experts to the next, with enable_eplb; 0 keeps the first",
        low=0,
    )
    eplb_load: Path | None = setting(
        None, _EXPERTS, "file of moe-serve experts --record, from which enable_eplb plans the first placement"
    )
    tune: bool = setting(
        False,
        _EXPERTS,
        "measure the experts' kernels at start, under a minute unless FlashInfer tunes its own, and keep the result",
    )
    tune_cache_dir: Path | None = setting(
        None,
        _EXPERTS,
        "folder where --tune keeps its results and every start looks for them; none for nowhere",
        default_text="moe-serve/tune in the user's cache folder",
    )

    tensor_parallel_size: int = setting(
        1, _RANKS, "ranks that share the attention of a request", low=1, high=_MAX_RANKS
    )
    data_parallel_size: int = setting(
        1, _RANKS, "groups of such ranks, each with requests and a KV cache of its own", low=1, high=_MAX_RANKS
    )
    expert_parallel_size: int = setting(
        1,
        _RANKS,
        "groups of ranks with different experts; 1 divides every expert among all ranks",
        low=1,
        high=_MAX_RANKS,
    )
    one_shot_sums: bool = setting(
        True,
        _RANKS,
        "sum the tensors of decode steps over tensor-parallel GPUs of one host by a kernel that reads the other GPUs' "
        "memory, where a check at start finds that it works; else NCCL does",
    )
    nnodes: int = setting(1, _RANKS, "hosts that share the ranks evenly", low=1, high=_MAX_RANKS)
    node_rank: int = setting(0, _RANKS, "number of this host; host 0 serves HTTP", low=0)
    master_addr: str | None = setting(None, _RANKS, "address of host 0, where the other hosts find it")
    master_port: int = setting(29500, _RANKS, "port of host 0 where ranks of several hosts meet", low=1, high=65535)
    base_gpu_id: int = setting(0, _RANKS, "number of the GPU of this host's first rank", low=0, high=1023)

    def __post_init__(self) -> None:
        check_settings(self, EngineConfigError)
        self._check_ranks()
        self._check_eplb()
        if self.device not in ("auto", "cpu", "cuda") and not (
            self.device.startswith("cuda:") and self.device[5:].isdigit()
        ):
            raise EngineConfigError(f"device is {self.device!r}: it must be auto, cpu, cuda or cuda:N")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise EngineConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}: it must be at least max_num_seqs "
                f"{self.max_num_seqs}, one token for every running request"
            )

    @property
    def max_requests(self) -> int:
        """Requests one scheduler holds at most, running and queued; more are refused at once."""
        return self.max_num_seqs + self.max_queued_requests

    def context_of(self, model_limit: int) -> int:
        """`max_model_len`, by default `model_limit`, what the model was made for.

        Raises:
            EngineConfigError: it is more than that.
        """
        if self.max_model_len is None:
            return model_limit
        if self.max_model_len > model_limit:
            raise EngineConfigError(
                f"max_model_len is {self.max_model_len}: this model was made for at most {model_limit} tokens; lower "
                "--max-model-len, or raise max_position_embeddings in config.json"
            )
        return self.max_model_len

    @property
    def num_ranks(self) -> int:
        """Ranks on all hosts; rank `r` is tensor-parallel rank `r % tensor_parallel_size` of its group."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def local_ranks(self) -> range:
        """Ranks on this host."""
        num_local = self.num_ranks // self.nnodes
        return range(self.node_rank * num_local, (self.node_rank + 1) * num_local)

    def _check_eplb(self) -> None:
        for name in ("num_redundant_experts", "eplb_load"):
            if getattr(self, name) is not None and not self.enable_eplb:
                raise EngineConfigError(f"{name} is {getattr(self, name)}: it needs enable_eplb")

    def _check_ranks(self) -> None:
        """What can be refused without the model; `model.parallel` and the model's family refuse the rest."""
        if self.num_ranks % self.nnodes:
            raise EngineConfigError(
                f"nnodes is {self.nnodes}: it must divide the {self.num_ranks} ranks of tensor_parallel_size "
                f"{self.tensor_parallel_size} x data_parallel_size {self.data_parallel_size}"
            )
        if self.node_rank >= self.nnodes:
            raise EngineConfigError(f"node_rank is {self.node_rank}: it must lie in 0..{self.nnodes - 1}")
        if self.nnodes > 1 and self.master_addr is None:
            raise EngineConfigError(f"master_addr is missing: nnodes is {self.nnodes}, and hosts have to find host 0")
        if self.master_addr is not None and not _can_name_a_host(self.master_addr):
            raise EngineConfigError(f"master_addr is {self.master_addr!r}: it must be the name or IP address of a host")
        if self.device.startswith("cuda:") and len(self.local_ranks) > 1 and self.num_pages is None:
            raise EngineConfigError(
                f"num_pages is missing: device {self.device} is shared by {len(self.local_ranks)} ranks, which cannot "
                "each measure what fits; set it, or leave device at auto to give every rank a GPU of its own"
            )
        if self.num_ranks % self.expert_parallel_size:
            raise EngineConfigError(
                f"expert_parallel_size is {self.expert_parallel_size}: it must divide the {self.num_ranks} ranks; "
                f"{self.num_ranks} gives every rank its own experts"
            )
        if self.data_parallel_size > 1 and self.expert_parallel_size == 1:
            raise EngineConfigError(
                f"expert_parallel_size is 1 and data_parallel_size is {self.data_parallel_size}: data-parallel ranks "
                f"share their experts, so set expert_parallel_size to {self.num_ranks}; for copies of the whole model, "
                f"start {self.data_parallel_size} services"
            )


def _can_name_a_host(text: str) -> bool:
    """Whether the resolver takes it; whether there is such a host, a start finds out."""
    try:
        return bool(text.encode("idna"))
    except UnicodeError:
        return False
