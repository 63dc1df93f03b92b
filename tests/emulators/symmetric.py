"""torch's symmetric memory, its one-shot all-reduce and our kernels for ranks that are threads; checks their rules.

The op: torch 2.13, CUDASymmetricMemoryOps.cu. It reads every rank's memory at the same place, adds in rank order in the
tensor's own dtype, and neither starts nor ends before all ranks have. Our kernels start when all ranks have, and may
end while others read.
"""

import torch

from tests.emulators.ranks import Rank
from tests.emulators.refusal import need

_PLACE_BYTES = 1 << 20  # torch's sums begin the memory, then each place of our kernel has as much
_POISON = 0x7F  # bytes of fresh memory: NaN in bf16


class SymmetricMemory:
    """The part of one rank. `num_bytes` is what the library was asked for."""

    def __init__(self, rank: Rank, num_bytes: int) -> None:
        self._rank, self._num_bytes = rank, num_bytes
        self._parts: list[torch.Tensor] = []
        self.num_sums = self.num_norms = self.num_gathers = 0

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

    def prepare_kernels(self) -> None:
        """Nothing is compiled."""

    def add_norm(
        self, place: int, x_TH: torch.Tensor | None, part_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, shape = part_TH.dtype, part_TH.shape
        need(x_TH is None or (x_TH.dtype == dtype and x_TH.shape == shape), "x is not like the part")
        places = self._rank.exchange((place, tuple(shape), dtype, x_TH is None))
        need(all(each == places[0] for each in places), f"the ranks sum different tensors: {places}")
        first = (1 + place) * _PLACE_BYTES
        parts = [each[first : first + part_TH.nbytes].view(dtype).view(shape) for each in self._parts]
        need(part_TH.nbytes <= _PLACE_BYTES, "a part is larger than its place")
        need(parts[self._rank.rank()].data_ptr() == part_TH.data_ptr(), "the part is not at its place")
        total_TH = torch.stack(parts).float().sum(0).to(dtype)
        total_TH = total_TH if x_TH is None else x_TH + total_TH
        self.num_norms += 1
        return total_TH, torch.nn.functional.rms_norm(total_TH.float(), weight_H.shape, weight_H, eps).to(dtype)

    def gather_columns(self, own_TU: torch.Tensor, out_TV: torch.Tensor, width: int) -> None:
        need(own_TU.dtype == out_TV.dtype == torch.float32, "fp32")
        need(own_TU.stride(1) == out_TV.stride(1) == 1 or own_TU.shape[1] < 2, "rows are not contiguous")
        calls = self._rank.exchange((tuple(out_TV.shape), width, own_TU))
        need(all(each[:2] == calls[0][:2] for each in calls), "the ranks gather different tensors")
        for rank, (_, _, columns_TU) in enumerate(calls):
            begin = rank * width
            need(columns_TU.shape[1] == max(0, min(width, out_TV.shape[1] - begin)), "a rank has other columns")
            out_TV[:, begin : begin + columns_TU.shape[1]] = columns_TU
        self._rank.exchange(None)  # others read what this rank gave
        self.num_gathers += 1

    def mail(self) -> None:
        """There is no kernel that could use boxes."""
