"""Compiles ahead, in many processes, what `bench_moe` will time; they share the compilers' caches on disk."""

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import moe_contenders
from benchmarks.moe_cases import CASES, id_sets, random_experts
from benchmarks.moe_contenders import Contender
from moe.cpu.threads import usable_cpus

LAYERS_PER_PROCESS = 4  # canonical and prepared weights, and what lies between them
CONTEXT_BYTES = 1e9  # of a process on the card


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One contender at some numbers of tokens."""

    model: str
    format_name: str
    backend: str
    tokens: int
    device: str = "cuda"


def compile_all(jobs: list[Job], free_bytes: float) -> None:
    """Call every job once; as many processes as there are cores and as the layer of the jobs fits into memory."""
    if not jobs:
        return
    case = CASES[jobs[0].model]
    layer_bytes = case.num_experts * case.expert_bytes(jobs[0].format_name)
    num_fitting = int(free_bytes / (LAYERS_PER_PROCESS * layer_bytes + CONTEXT_BYTES))
    in_processes(compile_one, jobs, num_fitting)


def in_processes(work: Callable[[Any], str | None], jobs: Sequence[Any], most: int) -> None:
    """Call `work` with every job, in `most` processes or as many as there are cores; print what it complains of."""
    num_processes = max(1, min(len(jobs), usable_cpus(), most))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        for future in concurrent.futures.as_completed([pool.submit(work, job) for job in jobs]):
            error = future.exception()  # a process that died
            message = f"{type(error).__name__}: {error}" if error else future.result()
            if message:
                print(message, flush=True)


_prepared: dict[tuple[str, str, str], Contender] = {}  # of this process: at most one


def compile_one(job: Job) -> str | None:
    """None, or why the job did not run: the benchmark will say so too."""
    device, case = torch.device(job.device), CASES[job.model]
    try:
        key = (job.model, job.format_name, job.backend)
        if key not in _prepared:
            _prepared.clear()
            torch.cuda.empty_cache()
            experts = random_experts(case, job.format_name, device, seed=0)
            _prepared[key] = moe_contenders.prepare(job.backend, case, experts, device)
        contender = _prepared[key]
        x_TH = contender.tokens(torch.randn(job.tokens, case.hidden_size, device=device).bfloat16())
        (topk,) = id_sets(case, job.tokens, "uniform", device, 1)
        routing = contender.stage(topk)

        def call() -> float:
            contender.run(0, x_TH, routing)
            if device.type == "cuda":
                torch.cuda.synchronize()
            return 0.0

        call()
        contender.choose(call)
    except Exception as error:
        return f"{job}: {type(error).__name__}: {str(error)[:200]}"
    return None
