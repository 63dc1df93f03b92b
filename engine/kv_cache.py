"""Allocates the paged KV tensors and decides how many pages there are. Who holds which page is `pages`' business."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.errors import EngineConfigError
from model.batch import KvLayerSpec, LayerKv

_CPU_TOKENS_PER_SEQ = 2048  # what a running request is expected to need at most on average
_CPU_MAX_BYTES = 1 << 30
GIB = 2**30

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLayout:
    """What one page costs: the layers of the model, the tokens of a page, the number format."""

    specs: tuple[KvLayerSpec, ...]
    page_size: int
    dtype: torch.dtype

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers."""
        numbers = sum(spec.num_heads * (spec.key_dim + spec.value_dim) for spec in self.specs)
        return numbers * self.page_size * self.dtype.itemsize

    def allocate(self, num_pages: int, device: torch.device) -> list[LayerKv]:
        """Zeroed cache of `num_pages` pages, one entry a layer. On a CPU the memory is touched only when written."""
        num_slots = num_pages * self.page_size
        return [
            LayerKv(
                torch.zeros(num_slots, spec.num_heads, spec.key_dim, dtype=self.dtype, device=device),
                torch.zeros(num_slots, spec.num_heads, spec.value_dim, dtype=self.dtype, device=device),
            )
            for spec in self.specs
        ]


def choose_cpu_pages(layout: KvLayout, *, max_num_seqs: int, max_model_len: int) -> int:
    """Pages for `max_num_seqs` requests of moderate length within 1 GiB, but at least for one of full length."""
    pages_per_request = -(-max_model_len // layout.page_size)
    wanted = max_num_seqs * min(pages_per_request, -(-_CPU_TOKENS_PER_SEQ // layout.page_size))
    return max(min(wanted, _CPU_MAX_BYTES // layout.bytes_per_page), pages_per_request)


def choose_cuda_pages(
    layout: KvLayout, *, device: torch.device, utilization: float, sampling_bytes: int, profile_run: Callable[[], None]
) -> int:
    """Pages that fit beside the weights and the activations of the largest step.

    `profile_run` runs such a step on a cache of its own; what it needs on top of the memory in use is set aside, and
    `sampling_bytes` for choosing tokens after it.

    Raises:
        EngineConfigError: not even one page fits.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    profile_run()
    torch.cuda.synchronize(device)
    step_bytes = torch.cuda.max_memory_allocated(device) - before_bytes + sampling_bytes
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    num_pages = count_pages(
        layout,
        total_bytes=total_bytes,
        utilization=utilization,
        used_bytes=total_bytes - free_bytes,
        step_bytes=step_bytes,
    )
    logger.info(
        "GPU memory: %.1f GiB in all, %.1f GiB free, %.2f GiB for a step, %.1f GiB for %d KV pages",
        total_bytes / GIB, free_bytes / GIB, step_bytes / GIB, num_pages * layout.bytes_per_page / GIB, num_pages,
    )  # fmt: skip
    return num_pages


def count_pages(layout: KvLayout, *, total_bytes: int, utilization: float, used_bytes: int, step_bytes: int) -> int:
    """KV pages that fit beside `used_bytes` of weights and the like, and `step_bytes` that a step needs.

    Raises:
        EngineConfigError: not even one page fits.
    """
    free_bytes = int(total_bytes * utilization) - used_bytes - step_bytes
    num_pages = free_bytes // layout.bytes_per_page
    if num_pages < 1:
        raise EngineConfigError(
            f"gpu_memory_utilization is {utilization}: of {total_bytes / GIB:.1f} GiB it allows "
            f"{total_bytes * utilization / GIB:.1f}, but weights and what is in use take {used_bytes / GIB:.1f} and "
            f"one step {step_bytes / GIB:.2f}, which leaves no room for a KV page of {layout.bytes_per_page} bytes; "
            "raise it, lower max_num_batched_tokens or max_num_seqs, set enforce_eager, or use a GPU with more memory"
        )
    return num_pages
