"""One expert layer, backend by backend: checks the result against the fp32 twin, then times CUDA graphs.

    python -m benchmarks.bench_moe --models gpt-oss-20b --formats mxfp4 --tokens 1,4,8,16,64,256,1024,4096
    python -m benchmarks.bench_moe --models gpt-oss-20b --formats mxfp4 --tokens 1,16 --backends triton --sweep

Every graph calls the layer once on each of several weight copies, which together exceed the L2 many times over. A row's
time is the median over id sets of the median over replays. The last line printed is one JSON object.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.moe_cases import CASES, LayerCase, random_experts, routing
from benchmarks.moe_sweep import sweep
from moe.config import MoeA2ABackend, MoeBackend
from moe.formats import ExpertWeights
from moe.registry import load_backend
from moe.runner import MoeRunner
from moe.topology import Topology
from moe.twin import moe_twin
from moe.types import StandardDispatchOutput, StandardTopK

DEVICE = torch.device("cuda")
COPY_BYTES = 400e6  # active bytes of all copies together: eight times the L2 of an H100


def main() -> None:
    """Run what the arguments ask for and print rows as they come."""
    args = _arguments()
    environment = {"card": torch.cuda.get_device_name(), "commit": args.commit or _commit(), "torch": torch.__version__}
    rows: list[dict[str, Any]] = []
    for model in args.models.split(","):
        for format_name in args.formats.split(","):
            for row in _measure_layer(CASES[model], format_name, args):
                rows.append(row | environment)
                print({key: value for key, value in row.items() if key not in ("model", "format")}, flush=True)
    document = json.dumps({"environment": environment, "rows": rows})
    if args.out:
        with open(args.out, "w", encoding="utf-8") as out:
            out.write(document + "\n")
    print(document if len(document) < 4000 else json.dumps({"environment": environment, "num_rows": len(rows)}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--models", default="gpt-oss-20b")
    parser.add_argument("--formats", default="mxfp4")
    parser.add_argument("--tokens", default="1,4,8,16,64,256,1024,4096")
    parser.add_argument("--backends", default="triton,flashinfer_mxfp4")
    parser.add_argument("--routing", default="uniform", help="uniform, zipf, or both with a comma")
    parser.add_argument("--sets", type=int, default=20, help="id sets per row")
    parser.add_argument("--sweep", action="store_true", help="search launch plans of the triton backend")
    parser.add_argument("--warm", action="store_true", help="only compile what --sweep will start from; no times")
    parser.add_argument("--out", help="file for the JSON document")
    parser.add_argument("--commit", help="commit to note where git is not at hand")
    return parser.parse_args()


def _commit() -> str:
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return result.stdout.strip()


def _measure_layer(case: LayerCase, format_name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    first = random_experts(case, format_name, DEVICE, seed=0)
    few_tokens = min(int(tokens) for tokens in args.tokens.split(","))
    active_bytes = first.nbytes * case.active(few_tokens) / case.num_experts
    num_copies = 1 if args.warm else max(2, min(8, round(COPY_BYTES / active_bytes)))
    rows = []
    for name in args.backends.split(","):
        try:
            layer = _Layer.prepare(MoeBackend(name), case, format_name, num_copies)
        except Exception as error:  # a rival that does not run here must not hide the others
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        for num_tokens in (int(tokens) for tokens in args.tokens.split(",")):
            for kind in args.routing.split(","):
                rows += _measure(layer, first, num_tokens, kind, args)
        del layer
        torch.cuda.empty_cache()
    return rows


@dataclasses.dataclass
class _Layer:
    """Several copies of one layer, prepared for one backend."""

    backend: MoeBackend
    case: LayerCase
    format_name: str
    runner: MoeRunner
    infos: list[Any]

    @classmethod
    def prepare(cls, backend: MoeBackend, case: LayerCase, format_name: str, num_copies: int) -> "_Layer":
        runner = MoeRunner(backend, MoeA2ABackend.NONE, case.config())
        infos = []
        for copy in range(num_copies):
            experts = random_experts(case, format_name, DEVICE, seed=copy)
            infos.append(load_backend(backend).prepare(experts, case.config(), Topology(device=DEVICE)))
        return cls(backend, case, format_name, runner, infos)

    def run(self, x: torch.Tensor, topk: StandardTopK, copy: int = 0) -> torch.Tensor:
        result = self.runner.run(StandardDispatchOutput(x, topk), self.infos[copy]).hidden_states
        assert isinstance(result, torch.Tensor)
        return result


def _measure(
    layer: _Layer, experts: ExpertWeights, num_tokens: int, kind: str, args: argparse.Namespace
) -> list[dict[str, Any]]:
    case = layer.case
    num_sets = args.sets if num_tokens <= 256 else max(3, args.sets // 4)
    topks = [routing(case, num_tokens, kind, DEVICE, seed=100 + index) for index in range(num_sets)]
    x = torch.randn(num_tokens, case.hidden_size, device=DEVICE).bfloat16()
    try:
        if args.warm:
            return [{"us": found["us"]} for found in sweep(layer.infos, x, topks[:1], run_once)]
        error = check(layer, experts, x, topks[0])
        row: dict[str, Any] = {
            "model": case.model,
            "format": layer.format_name,
            "tokens": num_tokens,
            "active_experts": statistics.median(int(topk.ids.unique().numel()) for topk in topks),
            "routing": kind,
            "backend": str(layer.backend),
            "floor_us": round(case.floor_us(layer.format_name, num_tokens), 1),
            "error": error,
        }
        if args.sweep and layer.backend is MoeBackend.TRITON:
            return [row | found for found in sweep(layer.infos, x, topks[: max(2, args.sets // 5)], time_us)]
        times = [
            time_us([lambda copy=copy, topk=topk: layer.run(x, topk, copy) for copy in range(len(layer.infos))])
            for topk in topks
        ]
    except Exception as failure:  # the other rows are still worth having
        print(f"{layer.backend} {num_tokens}: {type(failure).__name__}: {str(failure)[:400]}", flush=True)
        return []
    return [row | {"us": round(statistics.median(times), 2), "plan": _plan_of(layer, num_tokens)}]


def _plan_of(layer: _Layer, num_tokens: int) -> dict[str, Any] | None:
    plans = getattr(layer.infos[0], "plans", None)
    return None if plans is None else dataclasses.asdict(plans.pick(num_tokens))


def check(layer: _Layer, experts: ExpertWeights, x: torch.Tensor, topk: StandardTopK) -> float:
    """Relative error against the twin, some ids -1; the output is poisoned before, and two runs must agree bit by bit.

    Raises:
        ValueError: an unwritten or non-finite output, or bits that change from run to run.
    """
    ids = topk.ids.clone()
    if layer.backend is MoeBackend.TRITON and ids.shape[0] > 2:
        ids[1, 0] = -1
        ids[2] = -1
    masked = StandardTopK(topk.weights, ids)
    torch.use_deterministic_algorithms(True, warn_only=True)  # makes every torch.empty a tensor of NaN
    out = layer.run(x, masked)
    again = layer.run(x, masked)
    torch.use_deterministic_algorithms(False)
    want = moe_twin(x, masked, experts, layer.case.activation)
    error = float((out.float() - want).norm() / want.norm())
    if not bool(torch.isfinite(out).all()):
        raise ValueError("the output has numbers that nothing wrote, or that are not finite")
    if not torch.equal(out, again):
        raise ValueError("two runs on the same inputs differ")
    return round(error, 6)


def run_once(calls: list[Callable[[], Any]]) -> float:
    """Stands in for `time_us` where only compiled kernels are wanted."""
    calls[0]()
    return 1.0


def time_us(calls: list[Callable[[], Any]], replays: int = 7) -> float:
    """Median over replays of one graph's time per call, in microseconds."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


if __name__ == "__main__":
    main()
