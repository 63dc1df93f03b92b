"""Memory plan of a GPU: weights, a step, CUDA graphs, and KV pages in the rest; and of a CPU. Arithmetic only.

The engine counts its pages with `kv_cache.count_pages`, from memory that it has measured. `plan` uses the same function
with estimates of what cannot be known without the GPU: the driver's context and the activations of a step.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.cuda_graphs import graph_sizes
from engine.decode_inputs import count_numbers
from engine.errors import EngineConfigError, EngineError, MachineError
from engine.kv_cache import KvLayout, count_pages
from engine.page_needs import PageNeeds
from engine.prompt_graphs import prompt_sizes
from engine.step_buffers import buffer_bytes
from engine.units import size_text
from moe.shared_memory import NUM_BYTES

if TYPE_CHECKING:  # a scripted engine needs no model
    from model.sizes import ModelSizes, StepShape

_BYTES_PER_GRAPH = 32 << 20
_BYTES_PER_NUMBER = 4  # of `DecodeInputs`
_BYTES_PER_START, _BYTES_PER_LOGIT_ROW = 4, 8  # int32 and int64, of the rows of a step
_SAMPLING_BYTES_PER_LOGIT = 48  # the torch sampler's temporaries at its peak, filters on; the kernels need 12
_CONTEXT_BYTES = 700 << 20  # estimate: the CUDA context, kernels and library workspaces, of one rank
_HIDDEN_COPIES = 4  # estimate: residual, norm, and the input and output of a block
_SHORTEST_CONTEXT = 1024  # of the table


def sampling_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """Memory that choosing tokens needs after the largest step."""
    return _SAMPLING_BYTES_PER_LOGIT * max_num_seqs * vocab_size


def graph_bytes(max_num_seqs: int, vocab_size: int, tp_size: int = 1, *, max_prompt_tokens: int) -> int:
    """Memory that captured steps need on top of an eager step: fp32 logits, graph nodes and activations.

    `max_prompt_tokens` are those of the largest step with prompts that is captured, 0 if none is.
    All graphs write the same logits. Ranks that share a vocabulary first gather them, then join the parts.
    """
    num_graphs = len(graph_sizes(max_num_seqs)) + len(prompt_sizes(max_num_seqs, max_prompt_tokens))
    num_logits = 1 if tp_size == 1 else 3
    return num_logits * (max_num_seqs + 1) * vocab_size * 4 + num_graphs * _BYTES_PER_GRAPH


def graph_buffer_bytes(layout: KvLayout, *, max_num_seqs: int, max_model_len: int, max_prompt_tokens: int) -> int:
    """Memory of the tensors that captured steps read, most of it page tables: of `DecodeGraphs` and `PromptGraphs`.

    `max_prompt_tokens` as in `graph_bytes`. The engine may find room for a shorter context, whose tables are smaller.
    """
    num_pages, num_kinds = -(-max_model_len // layout.page_size), layout.num_kinds
    steps = [(max_num_seqs, max_num_seqs)]  # the most tokens and rows
    if max_prompt_tokens:
        sizes = prompt_sizes(max_num_seqs, max_prompt_tokens)
        steps.append((max((size.num_tokens for size in sizes), default=1), max_num_seqs + 1))
    numbers = count_numbers(max_rows=max_num_seqs, num_pages=num_pages, num_kinds=num_kinds)
    total = numbers * _BYTES_PER_NUMBER
    for max_tokens, max_rows in steps:
        total += buffer_bytes(max_tokens=max_tokens, max_rows=max_rows, num_pages=num_pages, num_kinds=num_kinds)
        total += (max_rows + 1) * _BYTES_PER_START + max_rows * _BYTES_PER_LOGIT_ROW
    return total


def activation_bytes(step: "StepShape", num_tokens: int, itemsize: int) -> int:
    """Estimate of the activations of a step of `num_tokens`; the engine measures them instead."""
    return num_tokens * itemsize * (_HIDDEN_COPIES * step.hidden_size + step.attention_width + step.experts_width)


def check_weights_fit(sizes: "ModelSizes", *, total_bytes: int, utilization: float, used_bytes: int) -> None:
    """Refuse, before any weight is read, weights that leave no room.

    Raises:
        EngineConfigError: they would not fit with the GPU to themselves; names the sizes and what to change.
        MachineError: they do not fit beside what is in use already.
    """
    if sizes.least_bytes + used_bytes < total_bytes * utilization:
        return
    kind = MachineError if sizes.least_bytes < total_bytes * utilization else EngineConfigError
    paths = ", ".join(f"{path.format_name} as {path.backend}" for path in sizes.experts)
    raise kind(
        f"gpu_memory_utilization is {utilization}: of {size_text(total_bytes)} it allows "
        f"{size_text(total_bytes * utilization)}, but the weights take {size_text(sizes.total_bytes)} (experts "
        f"{size_text(sizes.expert_bytes)}, {paths}) and {size_text(used_bytes)} are in use already; raise it, choose "
        "another moe_backend if that keeps the experts larger than the files, or use a GPU with more memory"
    )


def pages_refusal(layout: KvLayout, num_pages: int, *, memory_bytes: int) -> EngineError:
    """The error of a pool of `num_pages` pages, of all kinds of layers, that memory cannot hold.

    A setting is wrong if all `memory_bytes` of the device could not hold them.
    """
    num_kinds, page_bytes = layout.num_kinds, layout.bytes_per_page
    kind = EngineConfigError if num_pages * page_bytes > memory_bytes else MachineError
    return kind(
        f"num_pages is {num_pages // num_kinds}: KV pages of {num_kinds * page_bytes} bytes, "
        f"{size_text(num_pages * page_bytes)} in all, do not fit in memory; set num_pages lower"
    )


def loading_refusal(sizes: "ModelSizes", *, total_bytes: int, used_bytes: int) -> MachineError:
    """The error of a GPU whose memory does not last while the weights are loaded, though they may fit afterwards."""
    return MachineError(
        f"the weights do not fit while they are loaded: {size_text(used_bytes)} of {size_text(total_bytes)} are in use "
        f"already, and they take up to {size_text(sizes.peak_bytes)} while the last layer of experts is "
        f"processed ({size_text(sizes.total_bytes)} in the end); choose another moe_backend, share the weights among "
        "more ranks (tensor_parallel_size, expert_parallel_size), or use a GPU with more memory"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """A model on one GPU, or on a CPU (`is_gpu` false), where the cache takes what it needs.

    `total_bytes` is the memory of the GPU, or what one rank may use of the machine's. `refusal` says why nothing fits;
    `num_pages` is 0 then.
    """

    sizes: "ModelSizes"
    layout: KvLayout
    needs: PageNeeds
    is_gpu: bool
    total_bytes: int
    utilization: float
    context_bytes: int
    activation_bytes: int
    sampling_bytes: int
    graph_bytes: int
    graph_buffer_bytes: int
    num_pages: int
    refusal: str | None

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that fit into the KV cache as one request; as N requests, N windows of sliding layers fewer."""
        return self.needs.longest(self.num_pages)

    @property
    def fits_while_loading(self) -> bool:
        """Whether the peak of processing a layer stays within the memory. A CPU holds no layer twice."""
        peak_bytes = self.sizes.peak_bytes if self.is_gpu else self.sizes.total_bytes
        return peak_bytes + self.context_bytes <= self.total_bytes

    def kv_bytes_per_token(self, *, sliding: bool) -> int:
        """Bytes of one token in all layers with a sliding window, or in all without."""
        specs = [spec for spec in self.layout.specs if (spec.window is not None) == sliding]
        return sum(spec.num_heads * (spec.key_dim + spec.value_dim) for spec in specs) * self.layout.dtype.itemsize

    def concurrency(self, context_len: int) -> int:
        """Requests of `context_len` tokens that fit into the cache at the same time, all decoding."""
        return self.num_pages // self.needs.while_decoding(context_len)

    def table(self, max_model_len: int) -> dict[int, int]:
        """Concurrency by context length: powers of two up to `max_model_len`, and that."""
        lengths = []
        length = _SHORTEST_CONTEXT
        while length < max_model_len:
            lengths.append(length)
            length *= 2
        return {length: self.concurrency(length) for length in [*lengths, max_model_len]}


def make_plan(
    sizes: "ModelSizes",
    layout: KvLayout,
    *,
    total_bytes: int,
    utilization: float,
    max_num_seqs: int,
    needs: PageNeeds,
    max_model_len: int,
    uses_graphs: bool,
    max_prompt_tokens: int,
    tp_size: int = 1,
    num_pages: int | None = None,
) -> MemoryPlan:
    """The plan for a GPU of `total_bytes`; `num_pages` as set by the user, None for what fits.

    `max_prompt_tokens` as in `graph_bytes`, but it may be more than the tokens of a step or of the context.
    """
    step_tokens = min(needs.step_tokens, max_model_len)
    vocab_size = sizes.step.vocab_size
    prompt_tokens = min(max_prompt_tokens, step_tokens)
    captured_bytes = graph_bytes(max_num_seqs, vocab_size, tp_size, max_prompt_tokens=prompt_tokens)
    buffered_bytes = graph_buffer_bytes(
        layout, max_num_seqs=max_num_seqs, max_model_len=max_model_len, max_prompt_tokens=prompt_tokens
    )
    context_bytes = _CONTEXT_BYTES + (NUM_BYTES if tp_size > 1 else 0)
    parts: dict[str, Any] = {
        "context_bytes": context_bytes,
        "activation_bytes": activation_bytes(sizes.step, step_tokens, sizes.dtype.itemsize),
        "sampling_bytes": sampling_bytes(max_num_seqs, vocab_size),
        "graph_bytes": captured_bytes if uses_graphs else 0,
        "graph_buffer_bytes": buffered_bytes if uses_graphs else 0,
    }
    budget: dict[str, Any] = {"total_bytes": total_bytes, "utilization": utilization}
    refusal, pages = None, 0
    try:
        check_weights_fit(sizes, **budget, used_bytes=context_bytes)
        if sizes.peak_bytes + context_bytes > total_bytes:
            raise loading_refusal(sizes, total_bytes=total_bytes, used_bytes=context_bytes)
        step_bytes = sum(parts.values()) - context_bytes
        pages = count_pages(layout, **budget, used_bytes=context_bytes + sizes.total_bytes, step_bytes=step_bytes)
        pages = _chosen_pages(num_pages, pages, layout.num_kinds)
    except EngineError as error:
        refusal, pages = str(error), 0
    return MemoryPlan(
        sizes=sizes, layout=layout, needs=needs, is_gpu=True, **budget, **parts, num_pages=pages, refusal=refusal
    )


def make_cpu_plan(
    sizes: "ModelSizes", layout: KvLayout, *, needs: PageNeeds, num_pages: int, memory_bytes: int
) -> MemoryPlan:
    """The plan for a CPU where this rank may use `memory_bytes`, whatever of them is in use now.

    Experts stay as they are stored, or the first layers' do, where memory is too short for their processed form.
    """
    kv_bytes = num_pages * layout.bytes_per_page
    step_tokens = min(needs.step_tokens, num_pages * layout.page_size)  # no step has more than the cache holds
    step_bytes = activation_bytes(sizes.step, step_tokens, sizes.dtype.itemsize)
    if sizes.total_bytes + kv_bytes + step_bytes > memory_bytes:
        sizes = sizes.as_stored()
    refusal = None
    if kv_bytes > memory_bytes:
        refusal = str(pages_refusal(layout, num_pages, memory_bytes=memory_bytes))
    elif sizes.total_bytes + kv_bytes + step_bytes > memory_bytes:
        refusal = (
            f"the memory of this machine, or of this container, is {size_text(memory_bytes)} for each rank, but the "
            f"weights take {size_text(sizes.total_bytes)}, {num_pages} KV pages {size_text(kv_bytes)} and a step "
            f"{size_text(step_bytes)}; set max_model_len or num_pages lower if that is enough, or use a smaller model"
        )
    return MemoryPlan(
        sizes=sizes,
        layout=layout,
        needs=needs,
        is_gpu=False,
        total_bytes=memory_bytes,
        utilization=1.0,
        context_bytes=0,
        activation_bytes=step_bytes,
        sampling_bytes=0,
        graph_bytes=0,
        graph_buffer_bytes=0,
        num_pages=0 if refusal else num_pages,
        refusal=refusal,
    )


def _chosen_pages(wanted: int | None, fitting: int, num_kinds: int) -> int:
    """Pages of the pool: those that the user wants, for each kind of layer, or all that fit."""
    if wanted is None:
        return fitting
    if wanted * num_kinds > fitting:
        raise EngineConfigError(
            f"num_pages is {wanted}: {fitting // num_kinds} fit; set num_pages lower, or leave it out"
        )
    return wanted * num_kinds
