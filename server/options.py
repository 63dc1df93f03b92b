"""What `--help` says about every setting: group, words, choices. Types and defaults are the dataclasses'."""

from dataclasses import dataclass

_DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Option:
    """The words of one setting; `default_text` replaces a None."""

    group: str
    text: str
    choices: tuple[str, ...] = ()
    default_text: str = "none"


OPTIONS: dict[str, Option] = {
    "model": Option(
        "model",
        "folder of the checkpoint, name of a bundled model, or OWNER/NAME on the Hugging Face hub",
        default_text="the bundled model",
    ),
    "revision": Option("model", "branch, tag or commit of a model on the hub", default_text="the main branch"),
    "served_model_name": Option(
        "model",
        "names under which the API serves the model, separated by commas",
        default_text="the name on the hub, or the folder's",
    ),
    "load_format": Option("model", "auto reads the checkpoint; dummy makes random weights", ("auto", "dummy")),
    "dtype": Option("model", "of weights that are not quantized and of activations", _DTYPES),
    "max_model_len": Option(
        "model", "tokens a request may have, prompt and answer together", default_text="what the model was made for"
    ),
    "default_temperature": Option(
        "model", "temperature of requests that set none", default_text="the checkpoint's, else 1"
    ),
    "default_top_p": Option("model", "top_p of requests that set none", default_text="the checkpoint's, else 1"),
    "host": Option("HTTP", "address to listen on; 0.0.0.0 for all"),
    "port": Option("HTTP", "port to listen on; 0 picks a free one"),
    "api_key": Option("HTTP", "key that every route but /health, /health/live and /health/ready requires"),
    "client_header": Option(
        "HTTP",
        "header that names the client, such as X-Forwarded-For; only behind a proxy that sets it itself",
        default_text="none: clients are told apart by address",
    ),
    "cors_origins": Option(
        "HTTP", "origins whose pages may call the API from a browser, separated by commas; * for all"
    ),
    "max_body_bytes": Option("HTTP", "largest request body in bytes"),
    "drain_timeout": Option("HTTP", "seconds that running requests have to finish after SIGTERM"),
    "heartbeat_timeout": Option("HTTP", "seconds without a heartbeat of the engine until /health/live answers 503"),
    "stall_timeout": Option(
        "HTTP", "seconds without a token while requests wait or run, until /health/ready gives 503"
    ),
    "exit_on_engine_death": Option("HTTP", "exit with status 1 when the engine dies, instead of answering 503"),
    "receive_timeout": Option("HTTP", "seconds a client has to send a request's head, and again its body"),
    "log_level": Option("HTTP", "least severe messages that are logged"),
    "access_log": Option("HTTP", "log a line for every request"),
    "device": Option("engine", "auto, cpu, cuda or cuda:N"),
    "max_num_seqs": Option("engine", "requests that run at the same time"),
    "max_queued_requests": Option("engine", "requests that may wait; more are refused with 429"),
    "max_num_batched_tokens": Option("engine", "tokens of one step", default_text="512 on a CPU, 8192 on a GPU"),
    "max_step_ms": Option(
        "engine",
        "target time in ms of a step that reads prompts while others decode; 0 for none",
        default_text="60",
    ),
    "page_size": Option("engine", "tokens of a KV cache page"),
    "num_pages": Option("engine", "KV cache pages", default_text="what fits in memory"),
    "gpu_memory_utilization": Option("engine", "share of the GPU's memory to use"),
    "kv_cache_dtype": Option("engine", "of the KV cache; auto is the model's", _DTYPES),
    "attention_backend": Option("engine", "who computes attention", ("auto", "triton", "torch")),
    "enforce_eager": Option("engine", "serve without CUDA graphs: slower, starts sooner, easier to debug"),
    "enable_prefix_caching": Option("engine", "keep KV pages of prompts for requests that begin the same"),
    "seed": Option("engine", "makes requests without a seed repeatable", default_text="random"),
    "num_threads": Option("engine", "CPU threads of one step", default_text="all usable cores but one"),
    "moe_backend": Option(
        "mixture of experts",
        "who computes the experts",
        (
            "auto",
            "torch",
            "triton",
            "flashinfer_mxfp4",
            "flashinfer_cutlass",
            "flashinfer_cutedsl",
            "flashinfer_trtllm",
            "deep_gemm",
            "aiter",
        ),
    ),
    "moe_a2a_backend": Option(
        "mixture of experts",
        "who moves tokens between expert-parallel ranks",
        ("none", "deepep", "mori", "flashinfer", "mooncake", "nixl"),
    ),
    "deepep_mode": Option(
        "mixture of experts", "kernels of the transports that have two kinds", ("auto", "normal", "low_latency")
    ),
    "deepep_max_dispatch_tokens": Option("mixture of experts", "tokens one rank sends in a low-latency step"),
    "router_logits_dtype": Option("mixture of experts", "of router logits; auto is what the path wants", _DTYPES),
    "selfcheck": Option(
        "mixture of experts", "MoE layers compared with plain torch while loading", ("off", "first", "all")
    ),
    "tune": Option(
        "mixture of experts",
        "measure the experts' kernels at start, under a minute unless FlashInfer tunes its own, and keep the result",
    ),
    "tune_cache_dir": Option(
        "mixture of experts",
        "folder where --tune keeps its results and every start looks for them; none for nowhere",
        default_text="moe-serve/tune in the user's cache folder",
    ),
}
