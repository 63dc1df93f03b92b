"""Dispatch and combine of one expert layer between GPUs of one host, without its experts: DeepEP's and NCCL's.

    python -m benchmarks.bench_exchange [--ranks 2] [--tokens 1,16,128] [--transports none,normal,low_latency]

Tokens travel in bf16 through the dispatchers of the service. Each row has the microseconds of one exchange, the slowest
rank's median, in a CUDA graph where the dispatcher can be captured; `error` is that of the check at start, which has to
pass first. `none` gathers tokens and scatters sums, as data-parallel ranks do without a transport. The last line is
JSON. Exit status 1: an exchange failed. `--device cpu` measures gloo, without graphs, to try the program.
"""

import argparse
import json
import os
import sys
import tempfile
from typing import Any

import torch
from torch import distributed

from benchmarks.bench_sums import median_us
from moe.config import DispatchDtype, MoeA2ABackend, MoeRunnerConfig
from moe.dispatch.base import mode_options
from moe.dispatch.deepep_settings import DeepepMode, DeepepSettings
from moe.dispatch.round_trip import check_round_trip
from moe.dispatch.transport import DispatchSpec, build_transport, dispatch_formats
from moe.errors import MoeError
from moe.geometry import ExpertShape, RankPlace
from moe.group import TorchGroup
from moe.routing import StandardTopK
from moe.topology import Topology

SHAPES = {
    "gpt-oss-20b": ExpertShape(num_experts=32, top_k=4, hidden_size=2880, intermediate_size=2880),
    "deepseek-slice": ExpertShape(num_experts=64, top_k=8, hidden_size=7168, intermediate_size=2048),
    "small": ExpertShape(num_experts=8, top_k=2, hidden_size=2048, intermediate_size=128),
}
TRANSPORTS = ("none", *(mode for mode in DeepepMode if mode is not DeepepMode.AUTO))
EXCHANGES_PER_GRAPH = 20


def measure(shape: ExpertShape, transport: str, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """The rows of one transport, one for each number of tokens a rank. All ranks call it together."""
    group, rank = TorchGroup(), distributed.get_rank()
    limit = max(args.tokens)
    a2a = MoeA2ABackend.NONE if transport == "none" else MoeA2ABackend.DEEPEP
    place = RankPlace(ep_size=args.ranks, ep_rank=rank)
    config = MoeRunnerConfig(
        shape=shape, place=place, max_num_tokens=limit * (args.ranks if transport == "none" else 1)
    )
    settings = DeepepSettings(max_dispatch_tokens=limit)
    if transport != "none":
        settings = DeepepSettings(mode=DeepepMode(transport), max_dispatch_tokens=limit)
    formats = dispatch_formats(a2a, settings.mode)
    topology = Topology.at(place, device=device, a2a=a2a)
    built = build_transport(
        topology,
        config,
        group=distributed.group.WORLD,
        settings=settings,
        dispatch_dtypes={DispatchDtype.BF16},
        dp=group,
    )
    dispatcher = built.dispatcher(DispatchSpec(dispatch_dtype=DispatchDtype.BF16))
    error = check_round_trip(dispatcher, formats, config, topology, max_num_tokens=limit) if a2a != "none" else 0.0
    rows = []
    for num_tokens in args.tokens:
        torch.manual_seed(rank)
        x_TH = torch.randn(num_tokens, shape.hidden_size, device=device, dtype=torch.bfloat16)
        weights_TK, ids_TK = torch.rand(num_tokens, shape.num_experts, device=device).topk(shape.top_k)
        topk, options = StandardTopK(weights_TK, ids_TK.int()), mode_options(formats, is_decode=True)

        def exchange(x_TH: torch.Tensor = x_TH, topk: StandardTopK = topk, options: Any = options) -> None:
            dispatched = dispatcher.dispatch(x_TH, topk, **options)
            dispatcher.combine(dispatched.result(dispatched.hidden_states, topology.is_partial))

        captures = device.type == "cuda" and dispatcher.why_not_capturable(num_tokens) is None
        dispatcher.prepare_replay()
        time_us = median_us(exchange, group, device, num_calls=EXCHANGES_PER_GRAPH, captures=captures)
        rows.append({"transport": transport, "tokens": num_tokens, "us": time_us, "captured": captures, "error": error})
    return rows


def work(rank: int, args: argparse.Namespace, meeting: str) -> None:
    """One rank; the first prints."""
    on_gpu, device = args.device == "cuda", torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo", init_method=f"file://{meeting}", rank=rank, world_size=args.ranks
    )
    rows, failed = [], False
    for name in args.shapes:
        for transport in args.transports:
            try:
                found = measure(SHAPES[name], transport, args, device)
            except (MoeError, RuntimeError) as error:
                found, failed = [{"transport": transport, "failed": str(error).splitlines()[0]}], True
            rows += [{"shape": name, **row} for row in found]
            if rank == 0:
                print(*rows[-len(found) :], sep="\n", flush=True)
    if rank == 0:
        device_name = torch.cuda.get_device_name() if on_gpu else "cpu"
        print(json.dumps({"device": device_name, "ranks": args.ranks, "rows": rows}), flush=True)
    distributed.destroy_process_group()
    if failed:
        sys.exit(1)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=lambda text: [int(each) for each in text.split(",")], default=[1, 16, 128])
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=["gpt-oss-20b", "deepseek-slice"])
    parser.add_argument("--transports", type=lambda text: text.split(","), default=list(TRANSPORTS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(args, f"{folder}/meet"), nprocs=args.ranks)


if __name__ == "__main__":
    main()
