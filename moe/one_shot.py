"""`OneShotGroup`: ranks on GPUs of one host, whose small sums are one kernel that reads the other ranks' memory.

NCCL takes about 10 us for the sum of a decode step, however few bytes it has. torch's `one_shot_all_reduce` waits until
all ranks have written their part to memory that every rank can read, adds the parts in rank order, so that all ranks
get the same bits, and waits until all have read. Hence one buffer serves all sums of a stream, and CUDA graphs can hold
them. Multicast is not used.
"""

import logging
import socket
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from moe.errors import MoeConfigError
from moe.group import Group, Parcel, TorchGroup

MAX_BYTES = 1 << 20  # larger sums move more bytes in one shot than NCCL's rings do
DTYPES = (torch.bfloat16, torch.float32)
_ALIGNMENT = 16  # bytes; the kernel then moves as many at a time
_LIBRARY_ERRORS = (RuntimeError, ImportError, AttributeError)

logger = logging.getLogger(__name__)
T = TypeVar("T")


class SharedMemory(Protocol):
    """`MAX_BYTES` of every rank that the kernels of all ranks can read."""

    def allocate(self) -> torch.Tensor:
        """This rank's part, uint8 [MAX_BYTES]."""

    def connect(self, buffer: torch.Tensor) -> None:
        """Map the parts of the others; all ranks call it together."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """A new tensor: the sum over ranks of `part`, a view of `buffer` that begins with it."""


class TorchSharedMemory:
    """torch's symmetric memory among the ranks of a process group."""

    def __init__(self, group_name: str, device: torch.device) -> None:
        self._group_name, self._device = group_name, device

    def allocate(self) -> torch.Tensor:
        """On the device; peers may map it."""
        from torch.distributed import _symmetric_memory

        return _symmetric_memory.empty(MAX_BYTES, dtype=torch.uint8, device=self._device)

    def connect(self, buffer: torch.Tensor) -> None:
        """By a rendezvous of the group."""
        from torch.distributed import _symmetric_memory

        _symmetric_memory.rendezvous(buffer, self._group_name)  # type: ignore[arg-type]

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """One kernel. The op that also copies to the buffer may signal before all its threads have copied."""
        summed: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(part, "sum", self._group_name)
        return summed


class OneShotGroup:
    """`group` with another all-reduce for tensors of up to `MAX_BYTES`; everything else is the group's own."""

    def __init__(self, group: Group, memory: SharedMemory, buffer: torch.Tensor) -> None:
        """`buffer` is this rank's part of `memory`, which is connected."""
        self._group, self._memory, self._buffer = group, memory, buffer

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._group.size

    @property
    def is_capturable(self) -> bool:
        """As the group's."""
        return self._group.is_capturable

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The buffer, from which `all_reduce` need not copy, if it is large enough."""
        wanted = torch.empty(shape, dtype=dtype, device="meta")
        return self._part(wanted) if _fits(wanted) else torch.empty(shape, dtype=dtype, device=device)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor where the kernel takes `x`."""
        if not _fits(x):
            return self._group.all_reduce(x)
        part = self._part(x)
        if part.data_ptr() != x.data_ptr():
            part.copy_(x)
        return self._memory.sum(part)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The group's."""
        return self._group.all_gather(x)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """The group's."""
        return self._group.reduce_scatter(x)

    def exchange(self, sends: list[Parcel], receives: list[Parcel]) -> None:
        """The group's."""
        self._group.exchange(sends, receives)

    def max(self, values: list[float]) -> list[float]:
        """The group's."""
        return self._group.max(values)

    def broadcast(self, value: T) -> T:
        """The group's."""
        return self._group.broadcast(value)

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        """The beginning of the buffer as a tensor like `x`; it begins there on all ranks."""
        return self._buffer[: x.nbytes].view(x.dtype).view(x.shape)


def _fits(x: torch.Tensor) -> bool:
    """Depends on shape and dtype alone, so that all ranks decide alike."""
    return x.dtype in DTYPES and 0 < x.nbytes <= MAX_BYTES and x.nbytes % _ALIGNMENT == 0


def with_one_shot(group: TorchGroup, device: torch.device) -> Group:
    """The group with one-shot sums where these work, else the group itself; the log says why. All ranks call it."""
    if not group.is_capturable:
        return group  # gloo
    return try_one_shot(group, TorchSharedMemory(group.name, device), device)


def try_one_shot(group: Group, memory: SharedMemory, device: torch.device) -> Group:
    """As `with_one_shot`. After each step the ranks agree whether it worked on all."""
    opened: list[OneShotGroup] = []

    def allocate() -> None:
        opened.append(OneShotGroup(group, memory, memory.allocate()))

    def connect() -> None:
        memory.connect(opened[0]._buffer)

    def check() -> None:
        _check_sums(opened[0], group, device)

    for step in (lambda: _need_one_host(group), allocate, connect, check):
        reason = _reason_against(step)
        if group.max([float(reason is not None)])[0]:
            why = reason or "it does not work on another rank"
            logger.warning("sums over %d tensor-parallel ranks are left to NCCL: %s", group.size, why)
            return group
    logger.info("sums of up to %d KiB over %d tensor-parallel ranks take one kernel", MAX_BYTES >> 10, group.size)
    return opened[0]


def _reason_against(step: Callable[[], None]) -> str | None:
    try:
        step()
    except (MoeConfigError, *_LIBRARY_ERRORS) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


def _need_one_host(group: Group) -> None:
    """Raises MoeConfigError on a rank whose host is not that of the first one."""
    own = socket.gethostname()
    first = group.broadcast(own)
    if own != first:
        raise MoeConfigError(f"the ranks are on several hosts, {first} and {own}")


def _check_sums(one_shot: OneShotGroup, group: Group, device: torch.device) -> None:
    """Compare sums of whole numbers, which no order of adding rounds, with the group's own.

    Raises:
        MoeConfigError: a sum is wrong. It comes after all sums, in which the other ranks take part.
    """
    wrong = []
    for dtype in DTYPES:
        for num_bytes in (_ALIGNMENT, MAX_BYTES // 2 + _ALIGNMENT, MAX_BYTES):
            numbers = torch.arange(num_bytes // dtype.itemsize, device=device) % 13 + group.rank
            x = numbers.to(dtype)
            summed = one_shot.all_reduce(x)
            if not torch.equal(summed, group.all_reduce(x)):
                wrong.append(f"a one-shot sum of {num_bytes} bytes of {dtype} is wrong")
    if wrong:
        raise MoeConfigError(wrong[0])
