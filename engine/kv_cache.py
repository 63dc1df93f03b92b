"""Allocates the paged KV tensors and decides how many pages there are. Who holds which page is `paging`'s business."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count

import torch

from engine.errors import MachineError
from engine.page_needs import PageNeeds
from engine.units import size_text
from model.batch import KvLayerSpec, LayerKv

_CPU_TOKENS_PER_SEQ = 2048  # what a running request is expected to need at most on average
_CPU_MAX_BYTES = 1 << 30
GIB = 2**30

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLayout:
    """What one page costs: the layers of the model, the tokens of a page, the number format.

    A page is `page_size` slots of every tensor. Where full and sliding layers have pages of their own (`window`), the
    first full layer and the first sliding one share a tensor, then the second ones and so on: a page belongs to one
    kind of layer at a time, and any free page serves either kind.
    """

    specs: tuple[KvLayerSpec, ...]
    page_size: int
    dtype: torch.dtype

    @property
    def window(self) -> int | None:
        """Tokens that sliding layers see, where those have pages of their own; None where all layers share theirs.

        They have if there are both kinds of layers and all store the same, so that they can share tensors.
        """
        windows = {spec.window for spec in self.specs}
        has_one_shape = len({replace(spec, window=None) for spec in self.specs}) == 1
        if None not in windows or len(windows) == 1 or not has_one_shape:
            return None
        return max(window for window in windows if window is not None)

    @property
    def num_kinds(self) -> int:
        """Kinds of layers with pages of their own."""
        return 1 if self.window is None else 2

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all tensors."""
        return self._bytes_per_token(self._spec_of_tensor().values()) * self.page_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers."""
        return self._bytes_per_token(self.specs)

    def needs(self, step_tokens: int) -> PageNeeds:
        """How many pages requests need if the largest step has `step_tokens` tokens."""
        return PageNeeds(page_size=self.page_size, window=self.window, step_tokens=step_tokens)

    def allocate(self, num_pages: int, device: torch.device) -> list[LayerKv]:
        """Zeroed cache of `num_pages` pages, one entry a layer. All of its memory is in use from then on."""
        num_slots = num_pages * self.page_size
        tensors = {
            index: LayerKv(
                torch.zeros(num_slots, spec.num_heads, spec.key_dim, dtype=self.dtype, device=device),
                torch.zeros(num_slots, spec.num_heads, spec.value_dim, dtype=self.dtype, device=device),
            )
            for index, spec in self._spec_of_tensor().items()
        }
        return [tensors[index] for index in self._tensor_of_layer()]

    def _tensor_of_layer(self) -> list[int]:
        if self.window is None:
            return list(range(len(self.specs)))
        full, sliding = count(), count()
        return [next(full if spec.window is None else sliding) for spec in self.specs]

    def _spec_of_tensor(self) -> dict[int, KvLayerSpec]:
        return dict(zip(self._tensor_of_layer(), self.specs, strict=True))

    def _bytes_per_token(self, specs: Iterable[KvLayerSpec]) -> int:
        return sum(spec.num_heads * (spec.key_dim + spec.value_dim) for spec in specs) * self.dtype.itemsize


def choose_cpu_pages(layout: KvLayout, *, max_num_seqs: int, max_model_len: int, step_tokens: int) -> int:
    """Pages for `max_num_seqs` requests of moderate length within 1 GiB, but at least for one of full length."""
    needs = layout.needs(step_tokens)
    wanted = max_num_seqs * needs.while_decoding(min(max_model_len, _CPU_TOKENS_PER_SEQ))
    return max(min(wanted, _CPU_MAX_BYTES // layout.bytes_per_page), needs.at_most(max_model_len))


def choose_cuda_pages(
    layout: KvLayout, *, device: torch.device, utilization: float, sampling_bytes: int, profile_run: Callable[[], None]
) -> int:
    """Pages that fit beside the weights and the activations of the largest step.

    `profile_run` runs such a step on a cache of its own; what it needs on top of the memory in use is set aside, and
    `sampling_bytes` for choosing tokens after it.

    Raises:
        MachineError: not even one page fits.
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
        MachineError: not even one page fits, or one of each kind.
    """
    free_bytes = int(total_bytes * utilization) - used_bytes - step_bytes
    num_pages = free_bytes // layout.bytes_per_page
    if num_pages < layout.num_kinds:
        raise MachineError(
            f"gpu_memory_utilization is {utilization}: of {size_text(total_bytes)} it allows "
            f"{size_text(total_bytes * utilization)}, but weights and what is in use take {size_text(used_bytes)} and "
            f"one step {size_text(step_bytes, 2)}, which leaves no room for a KV page of "
            f"{layout.num_kinds * layout.bytes_per_page} bytes; "
            "raise it, lower max_num_batched_tokens or max_num_seqs, set enforce_eager, or use a GPU with more memory"
        )
    return num_pages
