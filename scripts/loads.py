"""Loads on a running service, by `moe-serve bench`: many streams at once, or many lengths at random times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scripts.card_end_to_end import ROOT, ServiceError, ask
from scripts.load_details import cpu_seconds, give_order, record_profile

# As in `benchmarks/results/service_vs_sglang_h200.json`, so that its figures of one card can be compared.
MANY_STREAMS, FEW_STREAMS_PROMPT, MANY_STREAMS_PROMPT = 256, 1000, 512
STREAMS_PER_PROCESS = 16  # of the client
PROFILE_PAUSES_S, PROFILE_S = (0.2, 1.5), 0.4
VOCAB_SIZE = 1024  # of random prompts: no model has fewer
MIXED_RATE = 12.0  # requests a second of the mixed load


def bench(url: str, out: Path, streams: int, answer_tokens: int, server: int, *, profiles: bool) -> dict[str, Any]:
    """Two rounds of so many requests at once, after one that does not count.

    `output_tokens_per_s` are all tokens over all time, prompts included; `decode_tokens_per_s` are the streams over the
    median time between two tokens, None where tokens arrive several at a time. `cpu_s` is what each process of the
    service used in all three rounds. The bench's status is 1 where the client was too busy for the figures to count.
    `profiles`: the ranks record steps at two moments of the load, and all figures suffer.
    """
    file = out / f"bench-{streams}.json"
    prompt_tokens = FEW_STREAMS_PROMPT if streams < MANY_STREAMS else MANY_STREAMS_PROMPT
    processes = max(1, min(streams // STREAMS_PER_PROCESS, len(os.sched_getaffinity(0)) // 2))
    command = _bench_command(
        url, file, "--concurrency", str(streams), "--num-requests", str(2 * streams), "--prompt-tokens",
        str(prompt_tokens), "--answer-tokens", str(answer_tokens), "--processes", str(processes),
    )  # fmt: skip
    if profiles:
        give_order(url, "reset_prefix_cache")  # its prompts are those of the load before
    before_s = cpu_seconds(server)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        if profiles:
            wait_for_load(url, streams)
            for pause_s in PROFILE_PAUSES_S:
                time.sleep(pause_s)
                record_profile(url, PROFILE_S)
        _, told = process.communicate()
    found = _take_results(file, f"bench with {streams} streams", told)
    if found["requests_finished"] != 2 * streams:
        raise ServiceError(f"bench with {streams} streams: {found['errors']}")
    latencies_ms = found["latencies_ms"]
    step_ms, token_ms = latencies_ms["itl"]["p50"], latencies_ms["tpot"]["p50"]
    tokens_come_singly = step_ms > token_ms / 2
    return {
        "streams": streams, "prompt_tokens": prompt_tokens, "answer_tokens": answer_tokens, "processes": processes,
        "output_tokens_per_s": found["output_tokens_per_s"],
        "decode_tokens_per_s": round(1000 * streams / step_ms, 1) if tokens_come_singly else None,
        "ttft_ms": latencies_ms["ttft"]["p50"], "tpot_ms": token_ms, "status": process.returncode,
        "cpu_s": {name: round(now_s - before_s[name], 2) for name, now_s in cpu_seconds(server).items()},
    }  # fmt: skip


def mixed_load(url: str, out: Path, seconds: float) -> dict[str, Any]:
    """Requests of many lengths at random times, so that prompts and decodes of all ranks mix.

    Raises:
        ServiceError: a request failed, or none ended.
    """
    file = out / "mixed.json"
    command = _bench_command(
        url, file, "--request-rate", str(MIXED_RATE), "--seconds", str(seconds), "--prompt-tokens", "20-3000",
        "--answer-tokens", "16-400",
    )  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=seconds + 120)
    found = _take_results(file, "mixed load", done.stderr)
    if found["errors"] or not found["requests_finished"]:
        raise ServiceError(f"mixed load: {found['requests_finished']} finished, errors {found['errors']}")
    stats = ask(f"{url}/health")["stats"]
    return {
        "seconds": seconds, "requests_a_second": MIXED_RATE, "finished": found["requests_finished"],
        "output_tokens_per_s": found["output_tokens_per_s"], "latencies_ms": found["latencies_ms"],
        "num_steps": stats["num_steps"], "num_preemptions": stats["num_preemptions"],
    }  # fmt: skip


def _bench_command(url: str, file: Path, *flags: str) -> list[str]:
    """`moe-serve bench` with random prompts and answers of full length, whose results go to a file."""
    return [
        sys.executable, "-m", "server", "bench", "--base-url", url, *flags, "--ignore-eos", "--vocab-size",
        str(VOCAB_SIZE), "--json", str(file),
    ]  # fmt: skip


def _take_results(file: Path, what: str, told: str) -> dict[str, Any]:
    """The results in a bench's file, which is removed. Raises ServiceError, which ends with `told`, without a file."""
    if not file.exists():
        raise ServiceError(f"{what}: {told[-1000:]}")
    results: dict[str, Any] = json.loads(file.read_text())["results"]
    file.unlink()
    return results


def wait_for_load(url: str, streams: int) -> None:
    """Until half of the streams run."""
    while (ask(f"{url}/health")["stats"] or {}).get("num_running", 0) < streams / 2:
        time.sleep(0.02)
