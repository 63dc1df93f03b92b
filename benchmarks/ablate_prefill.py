"""What binds the grouped GEMMs at many tokens: times GPT-OSS-20B's MXFP4 layer with one part of the kernel removed.

    python -m benchmarks.ablate_prefill --tokens 4096,1024 --out prefill_ablation.json

Each variant is a copy of the package whose inner loop (`moe/kernels/products.py`) was edited; its results are
wrong, and only its time counts. Times are medians of CUDA graph replays, whole layers. The last line printed is JSON.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.record import environment

ROOT = Path(__file__).parent.parent
_LOOP = "    for step in tl.range(step_begin, step_end, num_stages=NUM_STAGES):\n"
_LOAD_X = "        x = _activations(x_ptrs, is_row_M, step, num_cols, BLOCK_M, STEP_K, SHORT_K)\n"
_LOAD_X_1 = (
    "                x_1 = _activations(x_ptrs + PRODUCT_K, is_row_M, step, num_cols, BLOCK_M, STEP_K, SHORT_K)\n"
)
_LOAD_W = (
    "            words = _load_weights(w_ptrs + step * (num_blocks * BLOCK), BLOCK_M)\n"
    "            scales = _load_weights(s_ptrs + step * (num_blocks * (BLOCK // 2)), BLOCK_M)\n"
)
_IN_LOOP = "        if FORMAT == BF16:\n"
_START = _LOOP + _LOAD_X + _IN_LOOP
_HALVES = [f"_fp4_half(words, scales, {half}, FORMAT, BLOCK_N, WORDS, USE_ASM)" for half in (0, 1)]
_BITS = "tl.join(z, z).permute(0, 2, 1).reshape(BLOCK_N, 2 * WORDS)"
_AS_BF16 = "            z = words.to(tl.bfloat16, bitcast=True)\n"
_ONE_BLOCK = "    z = _load_weights(w_ptrs, BLOCK_M).to(tl.bfloat16, bitcast=True)\n"
_W_ONCE = [(_LOAD_W, ""), *((half, "w_once") for half in _HALVES)]
_X_ONCE = [(_LOAD_X_1, "")]


def _before_loop(*, weights: bool = False, activations: bool = False) -> tuple[str, str]:
    """Moves loads of the loop in front of it."""
    before = f"{_ONE_BLOCK}    w_once = {_BITS}\n" if weights else ""
    if activations:
        first = _LOAD_X.replace("step,", "step_begin,")[4:]
        before += first + first.replace("x = ", "x_1 = ").replace("x_ptrs,", "x_ptrs + PRODUCT_K,")
    return _START, before + (_LOOP + _IN_LOOP if activations else _START)


VARIANTS: dict[str, list[tuple[str, str]]] = {
    "whole kernel": [],
    "words loaded, not unpacked": [(_LOAD_W, _LOAD_W + _AS_BF16), *((half, _BITS) for half in _HALVES)],
    "no weights": [*_W_ONCE, _before_loop(weights=True)],
    "no activations": [*_X_ONCE, _before_loop(activations=True)],
    "products and stores alone": [*_W_ONCE, *_X_ONCE, _before_loop(weights=True, activations=True)],
}


def main() -> None:
    """Time every variant in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="4096,1024")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    counts = [int(count) for count in args.tokens.split(",")]
    if args.variant:
        print(json.dumps(_time(counts)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in VARIANTS:
            copy = _copy(Path(folder) / name.replace(" ", "_"), name)
            command = [sys.executable, "-m", "benchmarks.ablate_prefill", "--variant", name, "--tokens", args.tokens]
            done = subprocess.run(command, cwd=copy, stdout=subprocess.PIPE, text=True, check=True, env=_env(copy))
            rows.append({"variant": name, "us": json.loads(done.stdout.splitlines()[-1])})
            print(f"{name:<28}" + "".join(f"{us:>9.1f}" for us in rows[-1]["us"].values()), flush=True)
    result = environment() | {"model": "gpt-oss-20b", "format": "mxfp4", "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def _env(copy: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{copy}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def _copy(folder: Path, name: str) -> Path:
    """A copy of the packages with the variant's edits."""
    for package in ("moe", "benchmarks"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "results"))
    products = folder / "moe" / "kernels" / "products.py"
    text = products.read_text()
    for old, new in VARIANTS[name]:
        if text.count(old) != 1:
            raise ValueError(f"variant {name!r} does not fit {products.name} any more: {old.strip().splitlines()[0]}")
        text = text.replace(old, new)
    products.write_text(text)
    return folder


def _time(counts: list[int]) -> dict[str, float]:
    """Microseconds of the layer by number of tokens, with uniform routing and the shipped plans."""
    import torch

    from benchmarks.moe_cases import CASES, random_experts
    from moe import StandardDispatchOutput, StandardTopK, Topology
    from moe.backends.triton.backend import run_standard
    from moe.config import MoeBackend
    from moe.registry import load_backend
    from moe.types import RunState

    device, case = torch.device("cuda"), CASES["gpt-oss-20b"]
    config = case.config()
    info = load_backend(MoeBackend.TRITON).prepare(
        random_experts(case, "mxfp4", device, seed=0), config, Topology(device=device)
    )
    times = {}
    for count in counts:
        x_TH = torch.randn(count, case.hidden_size, device=device, dtype=torch.bfloat16)
        sets = [torch.rand(count, case.num_experts, device=device).topk(case.top_k) for _ in range(4)]
        batches = [StandardDispatchOutput(x_TH, StandardTopK(s.values, s.indices.int())) for s in sets]
        run_standard(batches[0], info, config, RunState())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for batch in batches:
                run_standard(batch, info, config, RunState())
        times[str(count)] = _median_us(graph, len(batches))
    return times


def _median_us(graph: Any, num_calls: int, *, num_replays: int = 40) -> float:
    import torch

    samples: list[float] = []
    for _ in range(num_replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / num_calls)
    return statistics.median(samples)


if __name__ == "__main__":
    main()
