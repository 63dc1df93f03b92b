"""`SharedMemory`: what the ranks of one host's GPUs read and write of each other, and the kernels that do it.

Every rank's memory:

    [ torch's sums: MAX_BYTES | parts of attention: MAX_BYTES | parts of MLPs: MAX_BYTES | flags of both |
      columns: MAX_COLUMN_BYTES | flags of their blocks | token boxes ]
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from moe.backends.c_compiler import missing_for_triton
from moe.errors import MoeConfigError
from moe.group import SumPlace, TokenMail

MAX_BYTES = 1 << 20  # larger sums move more bytes in one shot than NCCL's rings do
DTYPES = (torch.bfloat16, torch.float32)
MAX_ROWS = 256  # of a sum that is normed by the same kernel; a program for each fits the GPU at once
MAX_RANKS = 8
MAX_COLUMN_BYTES = 64 << 20  # 80 rows of fp32 logits of a vocabulary of 201,088
BLOCK = 1024  # columns of a program
MAX_BLOCKS = 1 << 14
ALIGNMENT = 16  # bytes; the kernels then move as many at a time
_FLAG_BYTES = MAX_ROWS * MAX_RANKS * torch.int32.itemsize  # of a place
_FIRST_COLUMN_BYTE = (1 + len(SumPlace)) * MAX_BYTES + len(SumPlace) * _FLAG_BYTES
_FIRST_BLOCK_FLAG = _FIRST_COLUMN_BYTE + MAX_COLUMN_BYTES
_FIRST_BOX_BYTE = _FIRST_BLOCK_FLAG + MAX_BLOCKS * MAX_RANKS * torch.int32.itemsize
_NUM_BOXES = 1024  # requests whose tokens can be sent in one step (`TokenMail`)
NUM_BYTES = _FIRST_BOX_BYTE + _NUM_BOXES * torch.int32.itemsize
EPS = 1e-5  # of the norms that are checked


class SharedMemory(Protocol):
    """`NUM_BYTES` of every rank that the kernels of all ranks can read."""

    def allocate(self) -> torch.Tensor:
        """This rank's memory, uint8 [NUM_BYTES], with clear flags and empty boxes."""

    def connect(self, buffer: torch.Tensor) -> None:
        """Map the memory of the others; all ranks call it together."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """A new tensor: the sum over ranks of `part`, a view of `buffer` that begins with it."""

    def prepare_kernels(self) -> None:
        """Make `add_norm` and `gather_columns` ready. No rank waits for another, so any may fail.

        Raises:
            MoeConfigError: a kernel cannot run here, and why.
        """

    def add_norm(
        self, place: SumPlace, x_TH: torch.Tensor | None, part_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x`, if there is one, plus the sum over ranks of the parts at `place`, and its RMS norm. `part` is this
        rank's.
        """

    def gather_columns(self, own_TU: torch.Tensor, out_TV: torch.Tensor, width: int) -> None:
        """As `Group.gather_columns`."""

    def mail(self) -> TokenMail | None:
        """The token boxes, where `prepare_kernels` has passed; None if kernels cannot reach them."""


class TorchSharedMemory:
    """torch's symmetric memory among the ranks of a process group."""

    def __init__(self, group_name: str, rank: int, device: torch.device) -> None:
        self._group_name, self._rank, self._device = group_name, rank, device
        self._norms: list[Callable[..., tuple[torch.Tensor, torch.Tensor]]] = []  # by place

    def allocate(self) -> torch.Tensor:
        """On the device; peers may map it."""
        from torch.distributed import _symmetric_memory

        buffer = _symmetric_memory.empty(NUM_BYTES, dtype=torch.uint8, device=self._device).zero_()
        torch.cuda.synchronize(self._device)  # another rank may set a flag as soon as they are connected
        return buffer

    def connect(self, buffer: torch.Tensor) -> None:
        """By a rendezvous of the group."""
        from torch.distributed import _symmetric_memory

        self._handle = _symmetric_memory.rendezvous(buffer, self._group_name)  # type: ignore[arg-type]
        self._buffer = buffer

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """One kernel. The op that also copies to the buffer may signal before all its threads have copied."""
        summed: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(part, "sum", self._group_name)
        return summed

    def prepare_kernels(self) -> None:
        """Compile them, since a rank that compiled one when it is first used, and failed, would let the others wait."""
        addresses = [int(address) for address in self._handle.buffer_ptrs]
        if torch.version.hip is not None:
            raise MoeConfigError("the kernels are for NVIDIA's GPUs")
        if (reason := missing_for_triton()) is not None:
            raise MoeConfigError(reason)
        if len(addresses) > MAX_RANKS:
            raise MoeConfigError(f"there are more than {MAX_RANKS} ranks")
        if addresses[self._rank] != self._buffer.data_ptr():
            raise MoeConfigError("torch does not say where the memory of the ranks begins")
        from moe.kernels.columns import GatherColumns
        from moe.kernels.sum_norm import SumNorm

        def each(offset: int) -> list[int]:
            return [address + offset for address in addresses]

        for place in SumPlace:
            norm = SumNorm(each(first_byte(place)), each(_first_flag_byte(place)), self._rank, MAX_RANKS, self._device)
            self._norms.append(norm)
            for dtype in DTYPES:
                weight_H = torch.ones(checked_length(dtype), device=self._device)
                part_TH = weight_H.to(dtype)[None]
                for x_TH in (part_TH, None):
                    _compile(partial(norm.compile, x_TH, part_TH, weight_H, EPS))
        blocks = each(_FIRST_BLOCK_FLAG)
        self._columns = GatherColumns(each(_FIRST_COLUMN_BYTE), blocks, self._rank, MAX_RANKS, BLOCK, self._device)
        row_TU = torch.ones(1, 16, device=self._device)
        _compile(partial(self._columns.compile, row_TU, row_TU.repeat(1, len(addresses)), row_TU.shape[1]))

    def add_norm(
        self, place: SumPlace, x_TH: torch.Tensor | None, part_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One kernel."""
        return self._norms[place](x_TH, part_TH, weight_H, eps)

    def gather_columns(self, own_TU: torch.Tensor, out_TV: torch.Tensor, width: int) -> None:
        """One kernel."""
        self._columns(own_TU, out_TV, width)

    def mail(self) -> TokenMail | None:
        """All ranks are on one host, so there always are boxes."""
        addresses = tuple(int(address) + _FIRST_BOX_BYTE for address in self._handle.buffer_ptrs)
        return TokenMail(addresses, self._rank, _NUM_BOXES)


def _compile(compile_kernel: Callable[[], None]) -> None:
    try:
        compile_kernel()
    except Exception as error:  # of Triton, its compilers or the linker
        raise MoeConfigError(f"its kernel does not compile: {type(error).__name__}: {error}") from error


def first_byte(place: SumPlace) -> int:
    """Of the parts at a place."""
    return (1 + place) * MAX_BYTES


def _first_flag_byte(place: SumPlace) -> int:
    return (1 + len(SumPlace)) * MAX_BYTES + place * _FLAG_BYTES


def checked_length(dtype: torch.dtype) -> int:
    """Of rows, so that the most of them fill a place."""
    return MAX_BYTES // (MAX_ROWS * dtype.itemsize)
