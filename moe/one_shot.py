"""`OneShotGroup`: ranks on GPUs of one host, whose small sums are one kernel that reads the other ranks' memory.

NCCL takes about 10 us for the sum of a decode step, however few bytes it has. torch's `one_shot_all_reduce` waits until
all ranks have written their part to memory that every rank can read, adds the parts in rank order, so that all ranks
get the same bits, and waits until all have read. Hence one buffer serves all sums of a stream, and CUDA graphs can hold
them. Multicast is not used.

The sums of a layer take our own kernel, which also adds the residual stream and norms (`moe.kernels.sum_norm`). It does
not wait until all have read; `OneShotGroup.add_norm` says why that is safe. Every rank's memory:

    [ torch's sums: MAX_BYTES | parts of attention: MAX_BYTES | parts of MLPs: MAX_BYTES | flags of both | token boxes ]
"""

import logging
import socket
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from moe.backends.c_compiler import missing_for_triton
from moe.errors import MoeConfigError
from moe.group import Group, Parcel, PartialSum, SumPlace, TokenMail, TorchGroup

MAX_BYTES = 1 << 20  # larger sums move more bytes in one shot than NCCL's rings do
DTYPES = (torch.bfloat16, torch.float32)
MAX_ROWS = 256  # of a sum that is normed by the same kernel; a program for each fits the GPU at once
MAX_RANKS = 8
_ALIGNMENT = 16  # bytes; the kernels then move as many at a time
_FLAG_BYTES = MAX_ROWS * MAX_RANKS * torch.int32.itemsize  # of a place
_FIRST_BOX_BYTE = (1 + len(SumPlace)) * MAX_BYTES + len(SumPlace) * _FLAG_BYTES
_NUM_BOXES = 1024  # requests whose tokens can be sent in one step (`TokenMail`)
NUM_BYTES = _FIRST_BOX_BYTE + _NUM_BOXES * torch.int32.itemsize
_EPS = 1e-5  # of the norms that are checked
_LIBRARY_ERRORS = (RuntimeError, ImportError, AttributeError)

logger = logging.getLogger(__name__)
T = TypeVar("T")


class SharedMemory(Protocol):
    """`NUM_BYTES` of every rank that the kernels of all ranks can read."""

    def allocate(self) -> torch.Tensor:
        """This rank's memory, uint8 [NUM_BYTES], with clear flags and empty boxes."""

    def connect(self, buffer: torch.Tensor) -> None:
        """Map the memory of the others; all ranks call it together."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """A new tensor: the sum over ranks of `part`, a view of `buffer` that begins with it."""

    def prepare_norms(self) -> None:
        """Make `add_norm` ready. No rank waits for another, so any may fail.

        Raises:
            MoeConfigError: the kernel cannot run here, and why.
        """

    def add_norm(
        self, place: SumPlace, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` plus the sum over ranks of the parts at `place`, which are like `x`, and its RMS norm."""

    def mail(self) -> TokenMail | None:
        """The token boxes, where `prepare_norms` has passed; None if kernels cannot reach them."""


class TorchSharedMemory:
    """torch's symmetric memory among the ranks of a process group."""

    def __init__(self, group_name: str, rank: int, device: torch.device) -> None:
        self._group_name, self._rank, self._device = group_name, rank, device
        self._addresses: list[int] = []
        self._kernels: list[Callable[..., tuple[torch.Tensor, torch.Tensor]]] = []  # by place

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

    def prepare_norms(self) -> None:
        """Compile the kernel, since a rank that compiled it in its first sum, and failed, would let the others wait."""
        addresses = [int(address) for address in self._handle.buffer_ptrs]
        if torch.version.hip is not None:
            raise MoeConfigError("the kernel is for NVIDIA's GPUs")
        if (reason := missing_for_triton()) is not None:
            raise MoeConfigError(reason)
        if len(addresses) > MAX_RANKS:
            raise MoeConfigError(f"there are more than {MAX_RANKS} ranks")
        if addresses[self._rank] != self._buffer.data_ptr():
            raise MoeConfigError("torch does not say where the memory of the ranks begins")
        from moe.kernels.sum_norm import SumNorm

        for place in SumPlace:
            parts = [address + _first_byte(place) for address in addresses]
            flags = [address + _first_flag_byte(place) for address in addresses]
            kernel = SumNorm(parts, flags, self._rank, MAX_RANKS, self._device)
            self._kernels.append(kernel)
            for dtype in DTYPES:
                weight_H = torch.ones(_checked_length(dtype), device=self._device)
                try:
                    kernel.compile(weight_H.to(dtype)[None], weight_H, _EPS)
                except Exception as error:  # of Triton, its compilers or the linker
                    raise MoeConfigError(f"its kernel does not compile: {type(error).__name__}: {error}") from error

    def add_norm(
        self, place: SumPlace, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One kernel."""
        return self._kernels[place](x_TH, weight_H, eps)

    def mail(self) -> TokenMail | None:
        """All ranks are on one host, so there always are boxes."""
        addresses = tuple(int(address) + _FIRST_BOX_BYTE for address in self._handle.buffer_ptrs)
        return TokenMail(addresses, self._rank, _NUM_BOXES)


class OneShotGroup:
    """`group` with another all-reduce for tensors of up to `MAX_BYTES`, and with `add_norm` if `norms`; everything else
    is the group's own.
    """

    def __init__(self, group: Group, memory: SharedMemory, buffer: torch.Tensor) -> None:
        """`buffer` is this rank's part of `memory`, which is connected."""
        self._group, self._memory, self._buffer = group, memory, buffer
        self.norms = False
        self._last_place: SumPlace | None = None  # of `add_norm`; None after any other collective

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

    @property
    def mail(self) -> TokenMail | None:
        """Boxes for tokens, where kernels of ours read the memory of other ranks."""
        return self._memory.mail() if self.norms else None

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, place: SumPlace = SumPlace.MLP
    ) -> torch.Tensor:
        """From here neither `add_norm` nor `all_reduce` has to copy, if it is not too large."""
        wanted = torch.empty(shape, dtype=dtype, device="meta")
        if self._can_norm(wanted, place):
            return self._view(wanted, _first_byte(place))
        return self._view(wanted) if _fits(wanted) else torch.empty(shape, dtype=dtype, device=device)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor where torch's kernel takes `x`."""
        self._passed(x)
        if not _fits(x):
            return self._group.all_reduce(x)
        part = self._view(x)
        if part.data_ptr() != x.data_ptr():
            part.copy_(x)
        return self._memory.sum(part)

    def add_norm(
        self, x_TH: torch.Tensor, delta: PartialSum, weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """None for what is too large.

        The kernel ends while other ranks may still read this rank's part. So a place may be written again only after
        another collective of these ranks: a rank takes part in that when its own kernels before have ended, reading
        included. The two sums of a layer have two places; a second sum at one place without a collective in between
        is left to `all_reduce`, here and in `empty`. All ranks make the same calls, so they decide alike, and a
        captured step begins with the sum of the embedding, whatever was replayed before it.
        """
        part, place = delta.part.contiguous(), delta.place
        if not self._can_norm(part, place) or part.dtype != x_TH.dtype:
            return None
        shared = self._view(part, _first_byte(place))
        if shared.data_ptr() != part.data_ptr():
            shared.copy_(part)
        self._last_place = place
        return self._memory.add_norm(place, x_TH, weight_H, eps)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The group's."""
        self._passed(x)
        return self._group.all_gather(x)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """The group's."""
        self._passed(x)
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

    def _can_norm(self, part: torch.Tensor, place: SumPlace) -> bool:
        """Whether `add_norm` takes such a part now."""
        is_free = place is not self._last_place
        return self.norms and is_free and part.dim() == 2 and part.shape[0] <= MAX_ROWS and _fits(part)

    def _passed(self, x: torch.Tensor) -> None:
        """A collective of `x`, which without numbers waits for nobody."""
        if x.numel():
            self._last_place = None

    def _view(self, x: torch.Tensor, first_byte: int = 0) -> torch.Tensor:
        """The buffer from there on as a tensor like `x`; it begins there on all ranks."""
        return self._buffer[first_byte : first_byte + x.nbytes].view(x.dtype).view(x.shape)


def _first_byte(place: SumPlace) -> int:
    """Of the parts at a place."""
    return (1 + place) * MAX_BYTES


def _first_flag_byte(place: SumPlace) -> int:
    return (1 + len(SumPlace)) * MAX_BYTES + place * _FLAG_BYTES


def _checked_length(dtype: torch.dtype) -> int:
    """Of rows, so that the most of them fill a place."""
    return MAX_BYTES // (MAX_ROWS * dtype.itemsize)


def _fits(x: torch.Tensor) -> bool:
    """Depends on shape and dtype alone, so that all ranks decide alike."""
    return x.dtype in DTYPES and 0 < x.nbytes <= MAX_BYTES and x.nbytes % _ALIGNMENT == 0


def with_one_shot(group: TorchGroup, device: torch.device) -> Group:
    """The group with one-shot sums where these work, else the group itself; the log says why. All ranks call it."""
    if not group.is_capturable:
        return group  # gloo
    return try_one_shot(group, TorchSharedMemory(group.name, group.rank, device), device)


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
    _try_norms(opened[0], memory, group, device)
    return opened[0]


def _try_norms(one_shot: OneShotGroup, memory: SharedMemory, group: Group, device: torch.device) -> None:
    """Let the kernel of a sum also norm where that works, else say why not."""

    def check() -> None:
        one_shot.norms = True
        _check_norms(one_shot, group, device)

    for step in (memory.prepare_norms, check):
        reason = _reason_against(step)
        if group.max([float(reason is not None)])[0]:
            one_shot.norms = False
            why = reason or "it does not work on another rank"
            logger.warning("a sum over %d tensor-parallel ranks and its norm are two kernels: %s", group.size, why)
            return
    logger.info(
        "a sum of up to %d rows over %d tensor-parallel ranks and its norm are one kernel", MAX_ROWS, group.size
    )


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


def _check_norms(one_shot: OneShotGroup, group: Group, device: torch.device) -> None:
    """Compare `add_norm` with the group's own sum, again of whole numbers, and a norm of it.

    Raises:
        MoeConfigError: a sum or norm is wrong. It comes after all of them, in which the other ranks take part.
    """
    results: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]] = []
    for dtype in DTYPES:
        length = _checked_length(dtype)
        weight_H = 1.0 + torch.arange(length, device=device) % 3
        for num_rows in (1, 3, MAX_ROWS, 2, 1, MAX_ROWS):
            for place in SumPlace:
                numbers = torch.arange(num_rows * length, device=device).view(num_rows, length) + len(results)
                x, part = (numbers % 7 - 3).to(dtype), (numbers % 13 + group.rank).to(dtype)
                pair = one_shot.add_norm(x, PartialSum(part, one_shot, place), weight_H, _EPS)
                results.append((x, part, weight_H, pair))
    wrong = []
    for x, part, weight_H, pair in results:
        summed = x + group.all_reduce(part)
        normed = torch.nn.functional.rms_norm(summed.float(), weight_H.shape, weight_H, _EPS)
        last_bits = torch.finfo(x.dtype).eps * (1 if x.dtype is torch.bfloat16 else 8)
        if pair is None or not torch.equal(pair[0], summed):
            wrong.append(f"a sum of {tuple(x.shape)} in {x.dtype} is wrong")
        elif not torch.allclose(pair[1].float(), normed, rtol=last_bits, atol=0.0):
            wrong.append(f"the norm of a sum of {tuple(x.shape)} in {x.dtype} is wrong")
    if wrong:
        raise MoeConfigError(wrong[0])
