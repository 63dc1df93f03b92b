"""Serves on one card, backend by backend, and compares the answers with a CPU's.

Part `tiny`: the bundled model answers the same items with every backend; the answers must agree, item by item, with the
torch path on the CPU. Part `settings` asks the same of triton and flashinfer_mxfp4 with each KV cache format, with CUDA
graphs and without, with overlapped steps and without; `--jobs` servers share the card. Part `dummy`: a model with
GPT-OSS-20B's shape and random weights must start and answer. Every layer of all models is self-checked at start, and
the path and error of each are in the report.

    python scripts/card_end_to_end.py --out /tmp/card

prints one line per server and leaves answers, logs and `report.json` in the folder. Exit status 1: something failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from evals.client import ServerError  # noqa: E402  (this file runs as a program, beside the package)
from evals.servers import serving  # noqa: E402

TINY = ROOT / "assets" / "tiny-gpt-oss"
BACKENDS = "torch,triton,flashinfer_mxfp4,auto"
DUMMY_BACKENDS = "auto,triton,flashinfer_mxfp4"
PARTS = ("tiny", "settings", "dummy")
CARD_BACKENDS = ("triton", "flashinfer_mxfp4")
KV_FORMATS = {"bf16": ("--kv-cache-dtype", "auto"), "fp8": ("--kv-cache-dtype", "fp8")}
LAUNCHES = {"graphs": (), "eager": ("--enforce-eager",)}
STEPS = {"overlap": (), "plain": ("--no-overlap",)}
SHARED_CARD = ("--num-pages", "4096")  # servers that start together cannot all size their cache by free memory
MOST_POINTS = {"bf16": 0.5, "fp8": 1.0}  # of the right answers, per hundred, that a setting may win or lose
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
NUM_SEQS = 64  # requests at once, of every server and of the client
START_TIMEOUT_S = 240
ANSWER_TOKENS = 8
PACKAGES = ("torch", "triton", "transformers", "flashinfer-python")
# The published sizes; token ids are those of the bundled tokenizer, whose files stand in for the real ones.
GPT_OSS_20B: dict[str, Any] = {
    "num_hidden_layers": 24, "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
    "num_experts_per_tok": 4, "experts_per_token": 4, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "vocab_size": 201088, "sliding_window": 128, "max_position_embeddings": 131072,
    "initial_context_length": 4096, "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 4096, "truncate": False,
    },
}  # fmt: skip


class ServiceError(RuntimeError):
    """A server did not start, or did not answer as it should; the message ends with what it said last."""


def write_dummy_model(folder: Path, **changes: Any) -> Path:
    """A checkpoint without weights: GPT-OSS-20B's config, some keys changed, and the bundled tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(TINY / name, folder / name)
    config = json.loads((TINY / "config.json").read_text()) | GPT_OSS_20B | changes
    kinds = ("sliding_attention", "full_attention")
    config["layer_types"] = [kinds[layer % 2] for layer in range(config["num_hidden_layers"])]
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


@contextmanager
def service(log: Path, *flags: str) -> Iterator[tuple[str, float]]:
    """A running server: (its address, seconds until it was ready). Ends it, whatever happens.

    Raises:
        ServiceError: it ended, or was not ready in time.
    """
    command = [sys.executable, "-m", "server", "--port", "0", "--max-num-seqs", str(NUM_SEQS), *flags]
    start_s = time.monotonic()
    with ExitStack() as stack:
        try:
            url = stack.enter_context(serving(command, log, folder=ROOT, start_timeout_s=START_TIMEOUT_S))
        except ServerError as error:
            told = log.read_text(encoding="utf-8")[-1500:]
            raise ServiceError(f"{' '.join(flags)} did not start: {told}") from error
        yield url.removesuffix("/v1"), round(time.monotonic() - start_s, 1)


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """JSON of one request, a POST where there is a body. Raises ServiceError for a refusal."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)
    except urllib.error.URLError as error:
        told = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
        raise ServiceError(f"{url}: {error} {told}") from error


def what_runs(url: str, backend: str) -> dict[str, Any]:
    """What the server says of its layers: paths, worst self-check. Raises ServiceError unless all take `backend`."""
    info = ask(f"{url}/health/ready")["engine"]
    paths = Counter(line.partition(": ")[2] for line in info["moe_paths"])
    checks = info["selfcheck"]
    if backend != "auto" and any(not path.startswith(f"{backend} /") for path in paths):
        raise ServiceError(f"asked for {backend}, the layers run {dict(paths)}")
    if len(checks) != len(info["moe_paths"]):
        raise ServiceError(f"{len(checks)} of {len(info['moe_paths'])} layers were checked")
    worst = max(checks, key=lambda check: check["worst_error"] / check["tolerance"])
    return {
        "device": info["device"], "dtype": info["dtype"], "layers": info["moe_paths"], "paths": dict(paths),
        "load_seconds": round(info["load_seconds"], 1), "selfcheck": checks, "worst_error": worst["worst_error"],
        "tolerance": worst["tolerance"],
    }  # fmt: skip


def evals(*arguments: str) -> dict[str, Any]:
    """The JSON that an eval prints last. Raises ServiceError where it could not run."""
    command = [sys.executable, "-m", "evals", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise ServiceError(f"evals {arguments[0]}: {done.stderr[-1500:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_tiny(out: Path, name: str, backend: str, num_items: int, *flags: str, model: Path = TINY) -> dict[str, Any]:
    """One server with a bundled model answers the items into `<name>.json`."""
    log = out / f"{name}.log"
    with service(log, "--model", str(model), "--moe-backend", backend, "--selfcheck", "all", *flags) as (url, ready_s):
        row = {"part": "tiny", "name": name, "start_seconds": ready_s} | what_runs(url, backend)
        start_s = time.monotonic()
        result = evals(
            "tiny", "--base-url", f"{url}/v1", "--items", str(num_items), "--concurrency", str(NUM_SEQS),
            "--answers", str(out / f"{name}.json"),
        )  # fmt: skip
    categories = result["categories"].values()
    return row | {
        "items": sum(c["items"] for c in categories), "right": sum(c["right"] for c in categories),
        "tokens": sum(c["tokens"] for c in categories), "eval_seconds": round(time.monotonic() - start_s, 1),
        "percent": {category: c["percent"] for category, c in result["categories"].items()},
    }  # fmt: skip


def run_dummy(out: Path, model: Path, backend: str, *flags: str) -> dict[str, Any]:
    """One server with random weights answers one chat."""
    log = out / f"dummy-{backend}.log"
    chosen = ("--model", str(model), "--load-format", "dummy", "--moe-backend", backend, "--selfcheck", "all", *flags)
    with service(log, *chosen) as (url, ready_s):
        row = {"part": "dummy", "name": backend, "start_seconds": ready_s} | what_runs(url, backend)
        start_s = time.monotonic()
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": ANSWER_TOKENS, "temperature": 0}
        answer = ask(f"{url}/v1/chat/completions", body)
    [choice] = answer["choices"]
    if choice["finish_reason"] not in ("length", "stop") or not answer["usage"]["completion_tokens"]:
        raise ServiceError(f"an answer without tokens: {answer}")
    return row | {
        "answer_tokens": answer["usage"]["completion_tokens"], "finish_reason": choice["finish_reason"],
        "answer": choice["message"]["content"], "answer_seconds": round(time.monotonic() - start_s, 2),
    }  # fmt: skip


def attempt(part: str, name: str, run: Any, *arguments: Any) -> dict[str, Any]:
    """The row of one run, with `passed`; a failure becomes a row too, so that the other runs go on."""
    try:
        row: dict[str, Any] = run(*arguments) | {"passed": True}
    except (ServiceError, OSError) as error:
        row = {"part": part, "name": name, "passed": False, "error": str(error)}
    return row


def compare(out: Path, row: dict[str, Any], reference: dict[str, Any], at_least: float) -> None:
    """Add to a row of part `tiny` how far its answers agree with the reference's."""
    if not (row["passed"] and reference["passed"]):
        row["passed"] = False
        return
    files = [str(out / f"{name}.json") for name in (reference["name"], row["name"])]
    result = evals("compare", *files, "--at-least", str(at_least), "--alpha", "0")
    row |= {key: result[key] for key in ("agreement", "same_answer", "same_verdict", "passed")}


def combinations() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name of each combination of part `settings`: (backend, flags)."""
    return {
        f"{backend}-{kv}-{launch}-{steps}": (backend, (*KV_FORMATS[kv], *LAUNCHES[launch], *STEPS[steps], *SHARED_CARD))
        for backend in CARD_BACKENDS
        for kv in KV_FORMATS
        for launch in LAUNCHES
        for steps in STEPS
    }


def run_settings(args: argparse.Namespace, reference: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each combination: at most half a point from the CPU (fp8 KV: one), and with bf16 KV the same words."""

    def run(item: tuple[str, tuple[str, tuple[str, ...]]]) -> dict[str, Any]:
        name, (backend, flags) = item
        return attempt("tiny", name, run_tiny, args.out, name, backend, args.items, "--device", args.device, *flags)

    with ThreadPoolExecutor(args.jobs) as servers:
        for row in servers.map(run, combinations().items()):
            kv = row["name"].split("-")[1]
            compare(args.out, row, reference, args.at_least if kv == "bf16" else 0.0)
            if row["passed"]:
                row["points"] = round(100 * (row["right"] - reference["right"]) / row["items"], 2)
                row["passed"] = abs(row["points"]) <= MOST_POINTS[kv]
            yield row


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    if "error" in row:
        sys.stdout.write(f"{row['part']:6} {row['name']:18} FAILED: {row['error']}\n")
    else:
        paths = ", ".join(f"{count} x {path}" for path, count in row["paths"].items())
        text = f"self-check {row['worst_error']:.2g} of {row['tolerance']:.2g}, start {row['start_seconds']} s, "
        if row["part"] == "tiny":
            text += f"{row['right']} of {row['items']} right in {row['eval_seconds']} s, "
            text += f"{row['agreement']:.2%} as the CPU" if "agreement" in row else "reference"
        else:
            text += f"{row['answer_tokens']} tokens in {row['answer_seconds']} s"
        verdict = "ok" if row["passed"] else "FAILED"
        sys.stdout.write(f"{row['part']:6} {row['name']:18} {verdict}: {paths} on {row['device']}, {text}\n")
    sys.stdout.flush()


def environment() -> dict[str, Any]:
    """Card, commit and versions, as far as they can be found."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "cores": os.cpu_count()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    commands = {"card": "nvidia-smi --query-gpu=name --format=csv,noheader", "commit": "git rev-parse --short HEAD"}
    for name, command in commands.items():
        try:
            found[name] = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            found[name] = ""
        found[name] = found[name].strip() or None
    return found


def run_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows, shown as they come: one server at a time on the device, the reference beside the first."""
    rows: list[dict[str, Any]] = []
    on_device = ("--device", args.device)
    if "tiny" in args.parts or "settings" in args.parts:
        on_cpu = ("--device", "cpu", "--num-threads", str(args.reference_threads))
        with ThreadPoolExecutor(1) as beside:
            job = beside.submit(
                attempt, "tiny", "reference", run_tiny, args.out, "reference", "torch", args.items, *on_cpu
            )
            if args.device == "cpu":
                job.result()
            for name in args.backends if "tiny" in args.parts else ():
                row = attempt("tiny", name, run_tiny, args.out, name, name, args.items, *on_device)
                if not rows:
                    rows.append(job.result())
                    show(rows[0])
                compare(args.out, row, rows[0], args.at_least)
                rows.append(row)
                show(row)
            if "settings" in args.parts:
                if not rows:
                    rows.append(job.result())
                    show(rows[0])
                for row in run_settings(args, rows[0]):
                    rows.append(row)
                    show(row)
    if "dummy" in args.parts:
        model = write_dummy_model(args.out / "gpt-oss-20b", **args.dummy_config)
        for name in args.dummy_backends:
            rows.append(attempt("dummy", name, run_dummy, args.out, model, name, *on_device))
            show(rows[-1])
    return rows


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags."""

    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for answers, logs and the report")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", type=names, default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--backends", type=names, default=names(BACKENDS), help=f"of part tiny [{BACKENDS}]")
    parser.add_argument("--dummy-backends", type=names, default=names(DUMMY_BACKENDS), help=f"[{DUMMY_BACKENDS}]")
    parser.add_argument("--dummy-config", type=json.loads, default={}, help="JSON: keys of its config.json to change")
    parser.add_argument("--items", type=int, default=2000)
    parser.add_argument("--at-least", type=float, default=0.98, help="share of items with the very same answer")
    parser.add_argument("--jobs", type=int, default=4, help="servers at once in part settings [4]")
    parser.add_argument("--reference-threads", type=int, default=4, help="CPU threads of the reference")
    args = parser.parse_args(argv)
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"--parts {part}: known are {', '.join(PARTS)}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 where everything passed."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()
    rows = run_all(args)
    passed = all(row["passed"] for row in rows)
    seconds = round(time.monotonic() - start_s, 1)
    report = {"environment": environment(), "seconds": seconds, "passed": passed, "rows": rows}
    (args.out / "report.json").write_text(json.dumps(report, indent=1))
    sys.stdout.write(json.dumps({"report": str(args.out / "report.json"), "seconds": seconds, "passed": passed}) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the servers, too
    sys.exit(main())
