"""Measures models on two GPUs of one host: every way to divide them, in parts that can be resumed.

Each part is one model in one layout: the service starts with all layers self-checked, answers as one rank does, is
measured with several numbers of streams, and loses a rank by `kill -9`, after which it must end with status 1 and leave
neither processes nor memory of the GPUs. One GPU runs alone, once plainly and once counting tokens by expert. Two parts
come first. `sums` checks and times one-shot sums against NCCL's; if they are wrong, all services run without them.
`exchange` times dispatch and combine of one layer.

    python scripts/two_cards.py --out /tmp/two --deepep-source /path/to/DeepEP

runs parts until `--seconds` are over, and exits with 75 while some are left: run it again. `report.json` in the folder
has all parts and the names of those not run; the last line printed is JSON, too. Exit status 1: a part failed. Standard
library only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.card_end_to_end import (  # noqa: E402  (it stands beside this file, which runs as a program)
    TINY,
    ServiceError,
    ask,
    environment,
    evals,
    service,
    what_runs,
    write_dummy_model,
)
from scripts.load_details import children, summarize_profile  # noqa: E402
from scripts.loads import bench, mixed_load  # noqa: E402

MEMORY_SLACK_MIB = 64  # that a GPU may have in use after a service more than before it
PART_LIMIT_S = 150.0  # of `sums` and of `exchange`, which would hang where a kernel waits for ever
MORE_TO_DO = 75  # exit status: EX_TEMPFAIL
FIRST_GUESS_S = 150.0  # of a part, before one has been timed
# The H200's driver has no multicast over NVLink in most virtual machines.
WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
}  # fmt: skip
WITHOUT_ONE_SHOT = "--no-one-shot-sums"
SUM_TOKENS, SUM_TARGET_US = 64, 12.0  # of GPT-OSS-20B's hidden size, in bf16
# One HTTP process writes about 26,000 tokens a second there, fewer than two cards can.
HTTP_PROCESSES = ("--api-workers", "3")
DP2 = ("--data-parallel-size", "2", "--expert-parallel-size", "2", *HTTP_PROCESSES)
LIMIT = ("--deepep-max-dispatch-tokens", "256", "--max-num-seqs", "256")
ON_ONE = {"one": (), "one-workers": HTTP_PROCESSES, "one-flashinfer": ("--attention-backend", "flashinfer")}
LAYOUTS: dict[str, tuple[str, ...]] = {
    **ON_ONE,
    "tp2": ("--tensor-parallel-size", "2"),
    "tp2-nccl": ("--tensor-parallel-size", "2", WITHOUT_ONE_SHOT),
    "ep2": ("--tensor-parallel-size", "2", "--expert-parallel-size", "2"),
    "dp2": DP2,
    "dp2-eplb": (*DP2, "--enable-eplb", "--eplb-interval", "200"),
    "dp2-normal": (*DP2, "--moe-a2a-backend", "deepep", "--deepep-mode", "normal"),
    "dp2-low_latency": (
        *DP2, "--moe-a2a-backend", "deepep", "--deepep-mode", "low_latency", *LIMIT, "--max-num-batched-tokens", "256",
    ),
    "dp2-auto": (*DP2, "--moe-a2a-backend", "deepep", "--deepep-mode", "auto", *LIMIT),
}  # fmt: skip
BUNDLED = {"tiny": TINY} | {name: TINY.with_name(name) for name in ("tiny-deepseek-v3", "tiny-deepseek-v3-nvfp4")}
MODELS = (*BUNDLED, "gpt-oss-20b", "deepseek-slice")
# Eight layers of DeepSeek-V3, one of them dense, with a quarter of its experts: it fits one card, too.
DEEPSEEK_SLICE: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 64,
    "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "max_position_embeddings": 163840, "rope_theta": 10000,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu", "tie_word_embeddings": False,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
    },
}  # fmt: skip
PROMPTS = ["Hello", "What is 3 plus 20?", "Name a river.", "Count to ten.", "abc " * 200, "Sort 3, 1, 2."]


def model_flags(out: Path, model: str) -> tuple[str, ...]:
    """Flags that name a model, whose folder is written if need be."""
    if model in BUNDLED:
        return ("--model", str(BUNDLED[model]))
    folder = write_dummy_model(out / model)
    if model == "deepseek-slice":
        (folder / "config.json").write_text(json.dumps(DEEPSEEK_SLICE, indent=1))
    return ("--model", str(folder), "--load-format", "dummy")


def first_tokens(url: str) -> list[dict[str, Any]]:
    """After each prompt the next token and the log-probabilities of the best ones."""
    answers = []
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 5}
        [choice] = ask(f"{url}/v1/completions", body)["choices"]
        answers.append({"text": choice["text"], "top": choice["logprobs"]["top_logprobs"][0]})
    return answers


def difference(own: list[dict[str, Any]], one: list[dict[str, Any]]) -> float:
    """Largest difference of the probability of any token that both list."""
    return max(
        abs(math.exp(a["top"][token]) - math.exp(b["top"][token]))
        for a, b in zip(own, one, strict=True)
        for token in a["top"].keys() & b["top"].keys()
    )


def running(pid: int, words: str) -> list[int]:
    """Children of a process whose command lines have these words, oldest first."""
    lines = {child: Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ") for child in children(pid)}
    return sorted(child for child, line in lines.items() if words.encode() in line)


def gpu_memory_mib() -> list[int]:
    """Used memory of each GPU; empty where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [int(line) for line in found.split()]


def kill_a_rank(server: int, memory_before: list[int]) -> dict[str, Any]:
    """Kill the last rank, and see that the service ends with status 1, its ranks end, and GPUs get their memory back.

    Raises:
        ServiceError: something of it did not happen within 30 s; the message says what.
    """
    ranks = running(server, "rank_worker")
    if not ranks:
        raise ServiceError("the service has no processes of ranks")
    os.kill(ranks[-1], signal.SIGKILL)
    start_s = time.monotonic()

    def wait_for(what: str, is_so: Callable[[], object]) -> float:
        while not is_so():
            if time.monotonic() - start_s > 30:
                raise ServiceError(f"30 s after one rank was killed {what}")
            time.sleep(0.05)
        return round(time.monotonic() - start_s, 2)

    end_flags = os.WEXITED | os.WNOHANG | os.WNOWAIT  # the server's `Popen` still waits for it
    ended_s = wait_for("the service still runs", lambda: os.waitid(os.P_PID, server, end_flags))
    ended = os.waitid(os.P_PID, server, end_flags)
    if ended is None or (ended.si_code, ended.si_status) != (os.CLD_EXITED, 1):
        raise ServiceError(f"after one rank was killed the service ended with {ended}, not with status 1")
    wait_for("other ranks still run", lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))

    def is_freed() -> bool:
        return all(now <= MEMORY_SLACK_MIB + was for now, was in zip(gpu_memory_mib(), memory_before, strict=True))

    wait_for("GPU memory was still in use", is_freed)
    return {
        "killed_rank_seconds": ended_s,
        "gpu_memory_mib_before": memory_before,
        "gpu_memory_mib_after": gpu_memory_mib(),
    }


def measure_exchange(device: str) -> dict[str, Any]:
    """What `benchmarks.bench_exchange` finds. Raises ServiceError where an exchange failed."""
    command = [sys.executable, "-m", "benchmarks.bench_exchange", "--device", device]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PART_LIMIT_S)
    if done.returncode:
        raise ServiceError(f"exchange: {(done.stdout + done.stderr)[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_sums() -> dict[str, Any]:
    """What `benchmarks.bench_sums` finds on two cards. Raises ServiceError where one-shot sums fail or are wrong."""
    command = [sys.executable, "-m", "benchmarks.bench_sums"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PART_LIMIT_S)
    if done.returncode:
        raise ServiceError(f"one-shot sums: {(done.stdout + done.stderr)[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    [row] = [row for row in found["rows"] if row["tokens"] == SUM_TOKENS]
    return found | {"reaches_target": row["one_shot_us"] < SUM_TARGET_US}


def run_part(out: Path, args: argparse.Namespace, model: str, layout: str, *, one_shot: bool) -> dict[str, Any]:
    """One model in one layout."""
    folder = out / f"{model}-{layout}"
    folder.mkdir(parents=True, exist_ok=True)
    flags = (*model_flags(out, model), "--moe-backend", args.backend, "--selfcheck", "all", "--max-num-seqs", "256",
             "--device", args.device, *LAYOUTS[layout])  # fmt: skip
    if args.profile:
        flags = (*flags, "--profile-dir", str(folder / "profile"))
    if not one_shot and WITHOUT_ONE_SHOT not in flags:
        flags = (*flags, WITHOUT_ONE_SHOT)
    memory_before = gpu_memory_mib()
    with service(folder / "log", *flags) as (url, ready_s):
        [server] = running(os.getpid(), " -m server ")
        row = {"start_seconds": ready_s} | what_runs(url, args.backend)
        row["first_tokens"] = first_tokens(url)
        if model in BUNDLED:
            result = evals("tiny", "--base-url", f"{url}/v1", "--items", str(args.items), "--concurrency", "64",
                           "--answers", str(folder / "answers.json"))  # fmt: skip
            row["right"] = sum(category["right"] for category in result["categories"].values())
        measure = partial(bench, url, folder, answer_tokens=args.answer_tokens, server=server)
        row["bench"] = [measure(streams, profiles=False) for streams in args.streams]
        if args.profile:
            row["profiled"] = [measure(streams, profiles=True) for streams in args.streams]
            row["profiles"] = [summarize_profile(file) for file in sorted((folder / "profile").iterdir())]
        if args.mixed_seconds:
            row["mixed"] = mixed_load(url, folder, args.mixed_seconds)
        if layout not in ON_ONE:
            row |= kill_a_rank(server, memory_before)
    return row


def compare(out: Path, args: argparse.Namespace, row: dict[str, Any], one: dict[str, Any], part: str) -> None:
    """Add how far a layout's answers agree with one rank's, and whether that is enough."""
    model = part.partition("/")[0]
    row["probability_difference"] = round(difference(row["first_tokens"], one["first_tokens"]), 4)
    row["same_as_one_rank"] = row["probability_difference"] <= args.most_difference
    if model in BUNDLED:
        files = [str(out / name / "answers.json") for name in (f"{model}-one", part.replace("/", "-"))]
        result = evals("compare", *files, "--at-least", str(args.at_least), "--alpha", "0")
        row["agreement"] = result["agreement"]
        row["same_as_one_rank"] = row["same_as_one_rank"] and result["passed"]


def build_deepep(source: Path) -> dict[str, Any]:
    """Install DeepEP from its source, unless it can be imported."""
    start_s = time.monotonic()
    if subprocess.run([sys.executable, "-c", "import torch, deep_ep"], check=False).returncode == 0:
        return {"installed": "before"}
    headers = "/usr/local/cuda/include/cccl"
    env = os.environ | {"TORCH_CUDA_ARCH_LIST": "9.0", "CPATH": f"{headers}:{os.environ.get('CPATH', '')}"}
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", str(source)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServiceError(f"DeepEP was not built: {(done.stdout + done.stderr)[-2000:]}")
    return {"installed": str(source), "build_seconds": round(time.monotonic() - start_s, 1)}


def attempt(out: Path, args: argparse.Namespace, part: str, done: dict[str, Any]) -> dict[str, Any]:
    """The row of one part, whatever happens."""
    model, _, layout = part.partition("/")
    start_s = time.monotonic()
    try:
        if part == "deepep":
            row = build_deepep(args.deepep_source)
        elif part == "sums":
            row = measure_sums()
        elif part == "exchange":
            row = measure_exchange(args.device)
        else:
            row = run_part(out, args, model, layout, one_shot=done.get("sums", {}).get("passed", True))
            if layout != "one":
                one = done.get(f"{model}/one", {})
                if not one.get("passed"):
                    raise ServiceError(f"{model}/one has not passed: there is nothing to compare with")
                compare(out, args, row, one, part)
        passed = row.get("same_as_one_rank", True)
    except (ServiceError, OSError, subprocess.SubprocessError) as error:
        row, passed = {"error": str(error)}, False
    return row | {"passed": passed, "seconds": round(time.monotonic() - start_s, 1)}


def parts_of(args: argparse.Namespace) -> list[str]:
    """All parts, in their order; one rank comes before the others of a model."""
    layouts = sorted(args.layouts, key=lambda layout: layout != "one")
    named = [f"{model}/{layout}" for model in args.models for layout in layouts]
    first = ["deepep"] if args.deepep_source is not None else []
    return [*first, *(["sums", "exchange"] if args.device == "cuda" else []), *named]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags."""

    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs, answers and the report")
    parser.add_argument("--deepep-source", type=Path, help="folder of DeepEP's source, to be built first")
    parser.add_argument("--models", type=names, default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--layouts", type=names, default=list(LAYOUTS), help=", ".join(LAYOUTS))
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--items", type=int, default=200, help="of the bundled model's evals")
    parser.add_argument("--at-least", type=float, default=0.97, help="share of items with the very same answer")
    most_difference = "of any probability; tiny-deepseek-v3 needs 0.1, since rounding to bf16 moves some by 0.05"
    parser.add_argument("--most-difference", type=float, default=0.03, help=most_difference)
    parser.add_argument("--streams", type=lambda text: [int(each) for each in names(text)], default=[1, 64, 256])
    parser.add_argument("--answer-tokens", type=int, default=512, help="of each request whose speed is measured")
    parser.add_argument("--mixed-seconds", type=float, default=0.0, help="of a load of many lengths at random times")
    parser.add_argument("--profile", action="store_true", help="once more under load, with profiles of all ranks")
    parser.add_argument("--seconds", type=float, default=470.0, help="start no part that may not end by then")
    args = parser.parse_args(argv)
    for flag, given, known in (("models", args.models, MODELS), ("layouts", args.layouts, LAYOUTS)):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"--{flag} {unknown[0]}: known are {', '.join(known)}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 all passed, 1 something failed, 75 there is more to do."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.update(WITHOUT_MULTICAST)
    file, start_s = args.out / "report.json", time.monotonic()
    report = json.loads(file.read_text()) if file.exists() else {"environment": environment(), "parts": {}}
    done, parts = report["parts"], parts_of(args)
    for part in parts:
        if part in done:
            continue
        longest_s = max((row["seconds"] for row in done.values()), default=FIRST_GUESS_S)
        if time.monotonic() - start_s + 1.2 * longest_s > args.seconds:
            break
        done[part] = attempt(args.out, args, part, done)
        file.write_text(json.dumps(report, indent=1))
        sys.stdout.write(f"{part}: {'passed' if done[part]['passed'] else 'FAILED'} in {done[part]['seconds']} s\n")
        sys.stdout.flush()
    report["not_run"] = left = [part for part in parts if part not in done]
    file.write_text(json.dumps(report, indent=1))
    failed = [part for part, row in done.items() if not row["passed"]]
    sys.stdout.write(json.dumps({"report": str(file), "done": len(done), "left": left, "failed": failed}) + "\n")
    return MORE_TO_DO if left else 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the service, too
    sys.exit(main())
