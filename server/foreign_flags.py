"""Flags of vLLM and SGLang that this service does not have: what to give instead, or why nothing is needed."""

INSTEAD: dict[str, str] = {
    "--model-path": "--model",
    "--tp": "--tensor-parallel-size",
    "-tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--dp": "--data-parallel-size",
    "-dp": "--data-parallel-size",
    "--dp-size": "--data-parallel-size",
    "--ep": "--expert-parallel-size",
    "--ep-size": "--expert-parallel-size",
    "--enable-expert-parallel": "--expert-parallel-size",
    "--context-length": "--max-model-len",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--block-size": "--page-size",
    "--max-running-requests": "--max-num-seqs",
    "--max-num-queued-reqs": "--max-queued-requests",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--max-prefill-tokens": "--max-num-batched-tokens",
    "--disable-cuda-graph": "--enforce-eager",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--moe-runner-backend": "--moe-backend",
    "--all2all-backend": "--moe-a2a-backend",
    "--ep-num-redundant-experts": "--num-redundant-experts",
    "--dist-init-addr": "--master-addr",
    "--allowed-origins": "--cors-origins",
    "--admin-api-key": "--admin-key",
    "--api-server-count": "--api-workers",
    "--shutdown-timeout": "--drain-timeout",
    "--watchdog-timeout": "--step-timeout",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--enable-log-requests": "--log-requests",
    "--random-seed": "--seed",
}
"""Our flag with the same effect, or with the nearest; its values may be others."""

ADVICE: dict[str, str] = {
    "--kv-cache-memory-bytes": "the KV cache is counted in pages of --page-size tokens: --num-pages",
    "--max-total-tokens": "the KV cache is counted in pages of --page-size tokens: --num-pages",
    "--swap-space": "requests that lose their KV pages are computed again, none is swapped: leave the flag out",
    "--quantization": "how the weights are quantized is read from the checkpoint: leave the flag out",
    "--tokenizer": "the tokenizer is read from the folder of --model: leave the flag out",
    "--tokenizer-path": "the tokenizer is read from the folder of --model: leave the flag out",
    "--chat-template": "the chat template is read from the folder of --model: replace chat_template.jinja there",
    "--hf-overrides": "nothing overrides config.json: change a copy of the model's folder",
    "--json-model-override-args": "nothing overrides config.json: change a copy of the model's folder",
    "--trust-remote-code": "no code of a checkpoint is ever run: leave the flag out",
    "--pipeline-parallel-size": "layers are not divided among GPUs; see --tensor-parallel-size, --expert-parallel-size",
    "-pp": "layers are not divided among GPUs; see --tensor-parallel-size, --expert-parallel-size",
    "--pp-size": "layers are not divided among GPUs; see --tensor-parallel-size, --expert-parallel-size",
    "--reasoning-parser": "the tokenizer tells how the model marks reasoning: leave the flag out",
    "--tool-call-parser": "the tokenizer tells how the model writes calls: leave the flag out",
    "--enable-auto-tool-choice": "it is always on: leave the flag out",
    "--enable-chunked-prefill": "it is always on: leave the flag out",
    "--enable-metrics": "it is always on: leave the flag out",
}


def advice_on(flag: str) -> str | None:
    """What to say of a flag of another server; None for flags that are not in the tables."""
    if flag in INSTEAD:
        return f"; here it is {INSTEAD[flag]}"
    return f"; {ADVICE[flag]}" if flag in ADVICE else None
