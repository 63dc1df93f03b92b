"""From settings to a `MemoryPlan` for a GPU that need not be here: what `moe-serve plan` shows."""

from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.errors import EngineConfigError
from engine.kv_cache import GIB, choose_cpu_pages
from engine.memory_plan import MemoryPlan, make_cpu_plan, make_plan
from engine.model_settings import make_kv_layout, make_model_settings, max_step_tokens
from engine.prompt_graphs import largest_prompt_step
from model.sizes import ModelSizes, measure_model
from moe.cpu.memory import usable_bytes
from moe.device import Device
from moe.registry import load_backend


@dataclass(frozen=True, slots=True)
class Gpu:
    """A card: its architecture, and the memory that CUDA reports for it."""

    arch: str
    memory_gib: float


# Memory as CUDA reports it, less than on the label; of the 80 GB kinds of the first two.
GPUS = {
    "a100": Gpu("sm80", 79.2),
    "h100": Gpu("sm90", 79.2),
    "h200": Gpu("sm90", 139.8),
    "b200": Gpu("sm100", 178.4),
    "mi300x": Gpu("gfx942", 191.5),
}


def plan_engine(config: EngineConfig, gpu: Gpu | None) -> tuple[MemoryPlan, int]:
    """The plan of the engine with this config on `gpu`, None for this CPU, and the longest context it can serve.

    Reads headers only. Where the folder has no weights, the sizes are those of the form that config.json describes.

    Raises:
        ValueError: (of this package, the model's, the loaders', moe's) a setting or a file is wrong.
    """
    device = torch.device("cpu" if gpu is None else "cuda")
    settings = make_model_settings(config, device)
    sizes = measure_model(config.model, settings, None if gpu is None else Device(arch=gpu.arch))
    layout = make_kv_layout(config, sizes.kv_specs, sizes.dtype)
    max_model_len = config.context_of(sizes.max_model_len)
    needs = layout.needs(max_step_tokens(config, device))
    if gpu is None:
        if config.num_pages is None:
            pages = choose_cpu_pages(
                layout,
                max_num_seqs=config.max_num_seqs,
                max_model_len=max_model_len,
                step_tokens=needs.step_tokens,
            )
        else:
            pages = config.num_pages * layout.num_kinds
        memory_bytes = usable_bytes() // len(config.local_ranks)
        plan = make_cpu_plan(sizes, layout, needs=needs, num_pages=pages, memory_bytes=memory_bytes)
    else:
        plan = make_plan(
            sizes,
            layout,
            total_bytes=int(gpu.memory_gib * GIB),
            utilization=config.gpu_memory_utilization,
            max_num_seqs=config.max_num_seqs,
            needs=needs,
            max_model_len=max_model_len,
            uses_graphs=not config.enforce_eager and _are_capturable(sizes),
            tp_size=config.tensor_parallel_size,
            max_prompt_tokens=largest_prompt_step(config),
            num_pages=config.num_pages,
        )
    return plan, min(max_model_len, plan.num_kv_tokens) if plan.num_pages else max_model_len


def check_fits_cpu(config: EngineConfig) -> None:
    """Refuse, before any weight is read, what `moe-serve plan --gpu cpu` refuses. Raises EngineConfigError."""
    plan, _ = plan_engine(config, None)
    if plan.refusal is not None:
        raise EngineConfigError(plan.refusal)


def _are_capturable(sizes: ModelSizes) -> bool:
    """Whether decode steps can run in CUDA graphs as far as the experts go."""
    return all(load_backend(path.backend).is_capturable for path in sizes.experts)
