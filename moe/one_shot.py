"""`OneShotGroup`: ranks on GPUs of one host, whose small sums are one kernel that reads the other ranks' memory.

NCCL takes about 10 us for the sum of a decode step, however few bytes it has. torch's `one_shot_all_reduce` waits until
all ranks have written their part to memory that every rank can read, adds the parts in rank order, so that all ranks
get the same bits, and waits until all have read. Hence one buffer serves all sums of a stream, and CUDA graphs can hold
them. Multicast is not used.

The sums of a layer take our own kernel, which also adds the residual stream and norms (`moe.kernels.sum_norm`), and
the ranks' logits are put together by another one (`moe.kernels.columns`). Neither waits until all have read;
`OneShotGroup.add_norm` says why that is safe. `moe.shared_memory` has the memory and launches the kernels.
"""

import logging
import socket
from collections.abc import Callable
from typing import Literal, TypeVar

import torch

from moe.errors import MoeConfigError
from moe.group import Group, Parcel, PartialSum, SumPlace, TokenMail, TorchGroup, gather_then_place
from moe.shared_memory import (
    ALIGNMENT,
    BLOCK,
    DTYPES,
    EPS,
    MAX_BLOCKS,
    MAX_BYTES,
    MAX_COLUMN_BYTES,
    MAX_ROWS,
    SharedMemory,
    TorchSharedMemory,
    checked_length,
    first_byte,
)

_LIBRARY_ERRORS = (RuntimeError, ImportError, AttributeError)

logger = logging.getLogger(__name__)
T = TypeVar("T")


class OneShotGroup:
    """`group` with another all-reduce for tensors of up to `MAX_BYTES`; if `has_kernels`, with `add_norm` and another
    `gather_columns`, too. Everything else is the group's own.
    """

    def __init__(self, group: Group, memory: SharedMemory, buffer: torch.Tensor) -> None:
        """`buffer` is this rank's part of `memory`, which is connected."""
        self._group, self._memory, self._buffer = group, memory, buffer
        self.has_kernels = False
        # What others may still read or copy from: what the last collective used, if that was a kernel of ours.
        self._in_use: SumPlace | Literal["columns"] | None = None

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
        return self._memory.mail() if self.has_kernels else None

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, place: SumPlace = SumPlace.MLP
    ) -> torch.Tensor:
        """From here neither `add_norm` nor `all_reduce` has to copy, if it is not too large."""
        wanted = torch.empty(shape, dtype=dtype, device="meta")
        if self._can_norm(wanted, place):
            return self._view(wanted, first_byte(place))
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
        self, x_TH: torch.Tensor | None, delta: PartialSum, weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """None for what is too large.

        The kernel ends while other ranks may still read this rank's part. So a place may be written again only after
        another collective of these ranks: a rank takes part in that when its own kernels before have ended, reading
        included. The two sums of a layer have two places; a second sum at one place without a collective in between
        is left to `all_reduce`, here and in `empty`. All ranks make the same calls, so they decide alike.

        A captured step may follow any other: it begins with the sum of the embedding at the place of MLPs, and every
        step ends with another collective than a sum there, gathering the logits or, without logits, the sum of the last
        attention. So a rank whose step stops in between cannot take part in another: its engine ends.
        """
        part, place = delta.part.contiguous(), delta.place
        if not self._can_norm(part, place) or (x_TH is not None and part.dtype != x_TH.dtype):
            return None
        shared = self._view(part, first_byte(place))
        if shared.data_ptr() != part.data_ptr():
            shared.copy_(part)
        self._in_use = place
        return self._memory.add_norm(place, x_TH, shared, weight_H, eps)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The group's."""
        self._passed(x)
        return self._group.all_gather(x)

    def gather_columns(self, own_TU: torch.Tensor, out_TV: torch.Tensor, width: int) -> None:
        """One kernel, which leaves what it wrote to the other ranks' memory there; the rule of `add_norm` holds, and
        its sums come between two calls.
        """
        if self._can_gather(out_TV, width):
            self._in_use = "columns"
            self._memory.gather_columns(own_TU.contiguous(), out_TV, width)
        else:
            self._passed(out_TV)
            gather_then_place(self._group, own_TU, out_TV, width)

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
        is_free = place is not self._in_use
        return self.has_kernels and is_free and part.dim() == 2 and part.shape[0] <= MAX_ROWS and _fits(part)

    def _can_gather(self, out_TV: torch.Tensor, width: int) -> bool:
        """Whether `gather_columns` takes such rows now."""
        num_rows = out_TV.shape[0]
        num_bytes, num_blocks = num_rows * self.size * width * out_TV.itemsize, num_rows * -(-width // BLOCK)
        fits = 0 < num_bytes <= MAX_COLUMN_BYTES and num_blocks <= MAX_BLOCKS
        is_row_major = out_TV.dtype is torch.float32 and out_TV.stride(1) == 1
        return self.has_kernels and self._in_use != "columns" and fits and is_row_major

    def _passed(self, x: torch.Tensor) -> None:
        """A collective of `x`, which without numbers waits for nobody."""
        if x.numel():
            self._in_use = None

    def _view(self, x: torch.Tensor, first_byte: int = 0) -> torch.Tensor:
        """The buffer from there on as a tensor like `x`; it begins there on all ranks."""
        return self._buffer[first_byte : first_byte + x.nbytes].view(x.dtype).view(x.shape)


def _fits(x: torch.Tensor) -> bool:
    """Depends on shape and dtype alone, so that all ranks decide alike."""
    return x.dtype in DTYPES and 0 < x.nbytes <= MAX_BYTES and x.nbytes % ALIGNMENT == 0


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
    _try_kernels(opened[0], memory, group, device)
    return opened[0]


def _try_kernels(one_shot: OneShotGroup, memory: SharedMemory, group: Group, device: torch.device) -> None:
    """Use our own kernels where they work, else say why not."""

    def check_norms() -> None:
        one_shot.has_kernels = True
        _check_norms(one_shot, group, device)

    def check_columns() -> None:
        _check_columns(one_shot, group, device)

    for step in (memory.prepare_kernels, check_norms, check_columns):
        reason = _reason_against(step)
        if group.max([float(reason is not None)])[0]:
            one_shot.has_kernels = False
            why = reason or "it does not work on another rank"
            logger.warning(
                "a sum over %d tensor-parallel ranks and its norm are two kernels, and NCCL gathers logits: %s",
                group.size,
                why,
            )
            return
    logger.info(
        "a sum of up to %d rows over %d tensor-parallel ranks and its norm are one kernel, and so is gathering logits",
        MAX_ROWS,
        group.size,
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
        for num_bytes in (ALIGNMENT, MAX_BYTES // 2 + ALIGNMENT, MAX_BYTES):
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
        length = checked_length(dtype)
        weight_H = 1.0 + torch.arange(length, device=device) % 3
        for num_rows in (1, 3, MAX_ROWS, 2, 1, MAX_ROWS):
            for place in SumPlace:
                numbers = torch.arange(num_rows * length, device=device).view(num_rows, length) + len(results)
                x, part = (numbers % 7 - 3).to(dtype), (numbers % 13 + group.rank).to(dtype)
                pair = one_shot.add_norm(x, PartialSum(part, one_shot, place), weight_H, EPS)
                results.append((x, part, weight_H, pair))
    wrong = []
    for x, part, weight_H, pair in results:
        summed = x + group.all_reduce(part)
        normed = torch.nn.functional.rms_norm(summed.float(), weight_H.shape, weight_H, EPS)
        last_bits = torch.finfo(x.dtype).eps * (1 if x.dtype is torch.bfloat16 else 8)
        if pair is None or not torch.equal(pair[0], summed):
            wrong.append(f"a sum of {tuple(x.shape)} in {x.dtype} is wrong")
        elif not torch.allclose(pair[1].float(), normed, rtol=last_bits, atol=0.0):
            wrong.append(f"the norm of a sum of {tuple(x.shape)} in {x.dtype} is wrong")
    if wrong:
        raise MoeConfigError(wrong[0])


def _check_columns(one_shot: OneShotGroup, group: Group, device: torch.device) -> None:
    """Compare `gather_columns` with the group's own, for one row, for a vocabulary that does not divide, and for all of
    the memory.

    Raises:
        MoeConfigError: a column is wrong. It comes after all of them, in which the other ranks take part.
    """
    wrong: list[str] = []
    most_rows = MAX_COLUMN_BYTES // (one_shot.size * BLOCK * torch.float32.itemsize)
    for num_rows, width, missing in ((1, 16, 0), (3, BLOCK + 8, 5), (most_rows, BLOCK, 0)):
        num_own = width - (missing if group.rank == group.size - 1 else 0)
        numbers = torch.arange(num_rows * num_own, dtype=torch.float32, device=device)
        own_TU = numbers.view(num_rows, num_own) + 0.5 * group.rank
        got_TV, want_TV = (torch.zeros(num_rows, group.size * width - missing, device=device) for _ in "ab")
        one_shot.all_reduce(own_TU[:1, :8].contiguous())
        one_shot.gather_columns(own_TU, got_TV, width)
        gather_then_place(group, own_TU, want_TV, width)
        if not torch.equal(got_TV, want_TV):
            wrong.append(f"{num_rows} rows of {group.size * width - missing} columns are gathered wrongly")
    if wrong:
        raise MoeConfigError(wrong[0])
