"""From settings to something that can step: the model, its KV cache, the numbers left open. No requests yet."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.config import EngineConfig
from engine.cuda_graphs import DecodeGraphs, GraphSettings
from engine.grammar_check import Vocabulary
from engine.grammar_compiler import GrammarCompiler
from engine.kv_cache import KvLayout, choose_cpu_pages, choose_cuda_pages
from engine.memory_plan import (
    check_weights_fit,
    graph_buffer_bytes,
    graph_bytes,
    loading_refusal,
    pages_refusal,
    sampling_bytes,
)
from engine.model_settings import (
    choose_device,
    make_kv_layout,
    make_model_settings,
    max_step_tokens,
    rank_device_name,
)
from engine.page_needs import PageNeeds
from engine.prompt_graphs import PromptGraphs, largest_prompt_step
from engine.runner import Model, ModelRunner
from engine.step_pace import StepPace
from engine.types import EngineInfo, LayerCheck
from engine.units import MIB
from engine.warm_up import check_logits, run_prompt, run_step_sizes
from loaders.hf_config import read_config
from loaders.phases import Phase, StartPhases
from model.batch import LayerKv
from moe.check.selfcheck import SelfCheckReport
from moe.cpu.memory import usable_bytes
from moe.cpu.threads import usable_cpus
from moe.kernels.compile_ahead import compile_ahead

if TYPE_CHECKING:  # a scripted engine needs no model
    from engine.rank_links import RankLinks

_DEFAULT_STEP_MS = 60
_WARM_UP_TOKENS = 32  # a prompt of this many, then one more: every code path of a step ran before the first user
_MOST_GRAMMAR_THREADS = 8
_PACE_TOKENS = {"cpu": _WARM_UP_TOKENS, "cuda": 2048}  # of the prompt that is timed; a GPU needs many to be busy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedEngine:
    """A warmed-up runner and the numbers that depend on the model and the device."""

    runner: ModelRunner
    num_pages: int
    needs: PageNeeds
    max_model_len: int
    max_num_batched_tokens: int
    pace: StepPace | None  # None: a step may take any time
    overlaps: bool  # a step is launched before the one before is collected
    weight_bytes: int
    kv_cache_bytes: int

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that fit into the KV cache."""
        return self.needs.longest(self.num_pages)

    def make_info(self, config: EngineConfig, *, load_seconds: float) -> EngineInfo:
        """What the other process is told once."""
        model = self.runner.model
        return EngineInfo(
            max_model_len=self.max_model_len,
            vocab_size=model.vocab_size,
            page_size=config.page_size,
            num_pages=self.num_pages,
            num_kv_tokens=self.num_kv_tokens,
            max_requests=config.max_requests,
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            moe_paths=[layer.description for layer in model.moe_layers],
            load_seconds=load_seconds,
            selfcheck=[_layer_check(layer.selfcheck) for layer in model.moe_layers if layer.selfcheck is not None],
            weight_bytes=self.weight_bytes,
            kv_cache_bytes=self.kv_cache_bytes,
        )

    def make_grammar_compiler(self, config: EngineConfig) -> GrammarCompiler:
        """A compiler for the tokens of the model. On a CPU it leaves all threads but one to the model."""
        model = self.runner.model
        vocabulary = Vocabulary(
            source=config.model,
            size=model.vocab_size,
            eos_ids=frozenset(model.eos_token_ids),
            num_threads=1 if model.device.type == "cpu" else min(_MOST_GRAMMAR_THREADS, -(-usable_cpus() // 2)),
        )
        return GrammarCompiler(vocabulary, timeout_s=config.grammar_timeout, cache_bytes=config.grammar_cache_mib << 20)


def _layer_check(report: SelfCheckReport) -> LayerCheck:
    return LayerCheck(layer=report.layer, path=report.path, worst_error=report.worst_error, tolerance=report.tolerance)


def load_engine(
    config: EngineConfig, model: Model | None, ranks: "RankLinks | None" = None, phases: StartPhases | None = None
) -> LoadedEngine:
    """Load the model of the config unless one is given, size and allocate its KV cache, warm it up.

    Every rank calls it, with the same settings; `ranks` links this one to the others, None for a single rank. `phases`
    is the record of this start.

    Raises:
        ValueError: (of this package, the model's, the loaders') a setting or a file is wrong.
    """
    phases = phases or StartPhases()
    weight_bytes = 0
    if model is None:
        model = _build_model(config, phases, ranks)
        weight_bytes = _weight_bytes(config, model.device, ranks)
    with phases.phase(Phase.WARM_UP):
        return _warmed_up(config, model, weight_bytes, phases, ranks)


def _weight_bytes(config: EngineConfig, device: torch.device, ranks: "RankLinks | None") -> int:
    """Bytes of this rank's weights. On a GPU the log says more, to be compared with `moe-serve plan`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        logger.info(
            "weights: %.0f MiB on the GPU, at most %.0f MiB while loading; %.0f MiB are in use beside torch's memory",
            torch.cuda.memory_allocated(device) / MIB, torch.cuda.max_memory_allocated(device) / MIB,
            (total_bytes - free_bytes - torch.cuda.memory_reserved(device)) / MIB,
        )  # fmt: skip
        return torch.cuda.memory_allocated(device)
    from model.sizes import measure_model

    settings = make_model_settings(config, device, 0 if ranks is None else ranks.rank)
    return measure_model(config.model, settings).total_bytes


def _warmed_up(
    config: EngineConfig, model: Model, weight_bytes: int, phases: StartPhases, ranks: "RankLinks | None"
) -> LoadedEngine:
    max_model_len = config.context_of(model.max_model_len)
    step_tokens = max_step_tokens(config, model.device)
    layout = make_kv_layout(config, model.kv_specs, model.dtype)
    needs, is_sliding = layout.needs(step_tokens), layout.window is not None

    uses_graphs = _uses_graphs(config, model)

    def make_runner(kv: list[LayerKv]) -> ModelRunner:
        return ModelRunner(
            model, kv, page_size=config.page_size, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len,
            is_sliding=is_sliding,
        )  # fmt: skip

    def make_small_runner(num_pages: int) -> ModelRunner:
        return make_runner(layout.allocate(num_pages, model.device))

    def profile_run() -> None:
        num_tokens = min(step_tokens, max_model_len)
        run_prompt(make_small_runner(-(-num_tokens // config.page_size)), num_tokens)

    def launch_all() -> None:
        _launch_all(config, make_small_runner, max_model_len, min(step_tokens, max_model_len), uses_graphs=uses_graphs)

    if model.device.type == "cuda" and model.can_compile_ahead:
        compile_ahead("warm-up", launch_all, model.device)

    num_pages = _choose_pages(config, model, layout, max_model_len, profile_run, uses_graphs=uses_graphs)
    if ranks is not None:
        num_pages = ranks.min(num_pages)  # a page has the same number on all ranks
    num_kv_tokens = needs.longest(num_pages)
    if num_kv_tokens < max_model_len:
        logger.warning("max_model_len is lowered from %d to %d, what the KV cache holds", max_model_len, num_kv_tokens)
        max_model_len = num_kv_tokens
    runner = make_runner(_allocate(layout, num_pages + uses_graphs, model.device))
    if ranks is not None:
        runner.share_tokens = ranks.share_tokens
    num_tokens = min(_WARM_UP_TOKENS, max_model_len)
    step = run_prompt(runner, num_tokens)
    if config.load_format != "dummy":  # random bits may be any number
        check_logits(step)
    runner.sampler.warm_up()
    if uses_graphs:
        graphs = _make_graphs(config, runner, max_model_len, step_tokens, spare_page=num_pages)
        _capture_graphs(runner, *graphs, phases, ranks)
    if model.device.type == "cuda" and config.max_num_seqs > 1:
        run_step_sizes(runner, min(step_tokens, max_model_len))
    logger.info("KV cache: %d tokens fit, %d pages of %d tokens, %.0f MiB", num_kv_tokens, num_pages, config.page_size,
                num_pages * layout.bytes_per_page / MIB)  # fmt: skip
    return LoadedEngine(
        runner=runner,
        num_pages=num_pages,
        needs=needs,
        max_model_len=max_model_len,
        max_num_batched_tokens=step_tokens,
        pace=_measure_pace(config, runner, min(max_model_len, step_tokens)),
        overlaps=model.device.type == "cuda" if config.overlap is None else config.overlap,
        weight_bytes=weight_bytes,
        kv_cache_bytes=num_pages * layout.bytes_per_page,
    )


def _choose_pages(
    config: EngineConfig, model: Model, layout: KvLayout, max_model_len: int, profile_run: Callable[[], None], *,
    uses_graphs: bool,
) -> int:  # fmt: skip
    """Pages of the pool: what the settings say, what a GPU has room for, or what a CPU is given."""
    if config.num_pages is not None:
        return config.num_pages * layout.num_kinds
    if model.device.type == "cuda":
        aside_bytes = sampling_bytes(config.max_num_seqs, model.vocab_size)
        if uses_graphs:
            prompt_tokens = min(largest_prompt_step(config), max_step_tokens(config, model.device), max_model_len)
            aside_bytes += graph_bytes(
                config.max_num_seqs, model.vocab_size, config.tensor_parallel_size, max_prompt_tokens=prompt_tokens
            )
            aside_bytes += graph_buffer_bytes(
                layout, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len, max_prompt_tokens=prompt_tokens
            )
        return choose_cuda_pages(
            layout,
            device=model.device,
            utilization=config.gpu_memory_utilization,
            sampling_bytes=aside_bytes,
            profile_run=profile_run,
        )
    return choose_cpu_pages(
        layout,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        step_tokens=max_step_tokens(config, model.device),
    )


def _uses_graphs(config: EngineConfig, model: Model) -> bool:
    """Whether decode steps are captured. If the path cannot be, the log says why and the model runs without graphs."""
    if model.device.type != "cuda" or config.enforce_eager:
        return False
    reason = model.why_not_capturable(config.max_num_seqs)
    if reason is not None:
        logger.info("decode steps run without CUDA graphs: %s cannot be captured", reason)
    return reason is None


def _make_graphs(
    config: EngineConfig, runner: ModelRunner, max_model_len: int, step_tokens: int, spare_page: int
) -> tuple[DecodeGraphs, PromptGraphs | None]:
    """Graphs to be captured: of decode steps, and of steps with prompts if `largest_prompt_step` says so."""
    model = runner.model
    settings = GraphSettings(
        model=model,
        kv=runner.kv,
        logits_MV=torch.empty(config.max_num_seqs + 1, model.vocab_size, dtype=torch.float32, device=model.device),
        page_size=config.page_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        spare_page=spare_page,
        is_sliding=runner.is_sliding,
    )
    max_tokens = min(step_tokens, largest_prompt_step(config))
    prompts = PromptGraphs(settings, max_tokens=max_tokens) if max_tokens else None
    return DecodeGraphs(settings, runner.tokens_M), prompts


def _capture_graphs(
    runner: ModelRunner, decodes: DecodeGraphs, prompts: PromptGraphs | None, phases: StartPhases,
    ranks: "RankLinks | None",
) -> None:  # fmt: skip
    decodes.inputs.check(lambda is_so: is_so if ranks is None else bool(ranks.min(is_so)))
    num_sizes = len(decodes.sizes) + (0 if prompts is None else len(prompts.sizes))
    with phases.phase(Phase.GRAPHS, total=num_sizes):
        decodes.capture(lambda: phases.advance(Phase.GRAPHS))
        if prompts is not None:
            prompts.capture(decodes.pool, lambda: phases.advance(Phase.GRAPHS))
    runner.sampler.capture(decodes.logits_MV, decodes.sizes)
    runner.graphs, runner.prompt_graphs = decodes, prompts


def _launch_all(
    config: EngineConfig, make_runner: Callable[[int], ModelRunner], max_model_len: int, step_tokens: int, *,
    uses_graphs: bool,
) -> None:  # fmt: skip
    """Launch all kernels of the warm-up on a small cache of their own; `make_runner` takes the number of its pages."""
    spare_page = -(-step_tokens // config.page_size)
    runner = make_runner(spare_page + 1)
    run_prompt(runner, step_tokens)
    run_prompt(runner, min(_WARM_UP_TOKENS, step_tokens))
    runner.sampler.warm_up()
    if uses_graphs:
        decodes, prompts = _make_graphs(config, runner, max_model_len, step_tokens, spare_page)
        decodes.run_sizes()
        if prompts is not None:
            prompts.run_sizes()
    if config.max_num_seqs > 1:
        run_step_sizes(runner, step_tokens)


def _measure_pace(config: EngineConfig, runner: ModelRunner, max_tokens: int) -> StepPace | None:
    """The pace that the settings ask for, starting from the time per prompt token on the warmed-up model."""
    target_ms = _DEFAULT_STEP_MS if config.max_step_ms is None else config.max_step_ms
    if target_ms == 0:
        return None
    device = runner.model.device
    num_tokens = min(_PACE_TOKENS.get(device.type, _WARM_UP_TOKENS), max_tokens)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_s = time.monotonic()
    run_prompt(runner, num_tokens)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return StepPace(target_ms / 1000, (time.monotonic() - start_s) / num_tokens)


def _allocate(layout: KvLayout, num_pages: int, device: torch.device) -> list[LayerKv]:
    try:
        return layout.allocate(num_pages, device)
    except RuntimeError as error:  # what torch raises when memory runs out, on any device
        memory_bytes = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else usable_bytes()
        raise pages_refusal(layout, num_pages, memory_bytes=memory_bytes) from error


def _build_model(config: EngineConfig, phases: StartPhases, ranks: "RankLinks | None" = None) -> Model:
    from model.registry import build_model
    from model.sizes import measure_model

    if config.max_model_len is not None:  # refused before weights are read
        config.context_of(read_config(config.model).max_position_embeddings)
    rank = 0 if ranks is None else ranks.rank
    device = choose_device(rank_device_name(config, rank))
    settings = make_model_settings(config, device, rank)
    group = None if ranks is None else ranks.world
    if device.type != "cuda":
        from engine.plan import check_fits_cpu

        check_fits_cpu(config)
        return build_model(config.model, settings, group, phases=phases)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    used_bytes, sizes = total_bytes - free_bytes, measure_model(config.model, settings)
    check_weights_fit(sizes, total_bytes=total_bytes, utilization=config.gpu_memory_utilization, used_bytes=used_bytes)
    try:  # the peak of `sizes` is estimated from above, so only running out of memory tells
        return build_model(config.model, settings, group, phases=phases)
    except torch.OutOfMemoryError as error:
        raise loading_refusal(sizes, total_bytes=total_bytes, used_bytes=used_bytes) from error
