"""torch's symmetric memory and its one-shot all-reduce for ranks that are threads: checks what the op asks for.

The op: torch 2.13, CUDASymmetricMemoryOps.cu. It reads every rank's memory at the same place, adds in rank order in the
tensor's own dtype, and neither starts nor ends before all ranks have.
"""

import torch

from tests.emulators.ranks import Rank
from tests.emulators.refusal import need

_POISON = 0x7F  # bytes of fresh memory: NaN in bf16


class SymmetricMemory:
    """The part of one rank. `num_bytes` is what the library was asked for."""

    def __init__(self, rank: Rank, num_bytes: int) -> None:
        self._rank, self._num_bytes = rank, num_bytes
        self._parts: list[torch.Tensor] = []
        self.num_sums = 0

    def allocate(self) -> torch.Tensor:
        return torch.full((self._num_bytes,), _POISON, dtype=torch.uint8)

    def connect(self, buffer: torch.Tensor) -> None:
        self._parts = self._rank.exchange(buffer)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        own = self._parts[self._rank.rank()]
        need(part.untyped_storage().data_ptr() == own.untyped_storage().data_ptr(), "input is not symmetric memory")
        need(part.is_contiguous() and part.dtype in (torch.bfloat16, torch.float32), "contiguous bf16 or fp32")
        need(part.nbytes % 4 == 0, "input size must be at least 4-byte aligned")
        places = self._rank.exchange((part.storage_offset(), tuple(part.shape), part.dtype))
        need(all(place == places[0] for place in places), f"the ranks sum different tensors: {places}")
        first = part.storage_offset() * part.element_size()
        parts = [each[first : first + part.nbytes].view(part.dtype) for each in self._parts]
        summed = parts[0].clone()
        for each in parts[1:]:
            summed += each
        self._rank.exchange(None)  # all have read
        self.num_sums += 1
        return summed.view(part.shape)
