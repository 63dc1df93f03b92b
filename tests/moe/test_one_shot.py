"""`OneShotGroup` over emulated symmetric memory: which sums take a kernel, what they are, and what turns it off."""

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe import one_shot
from moe.group import SINGLE_RANK, PartialSum, SumPlace, TokenMail, TorchGroup, gather_then_place
from moe.one_shot import OneShotGroup, try_one_shot
from moe.shared_memory import BLOCK, MAX_BLOCKS, MAX_BYTES, MAX_COLUMN_BYTES, MAX_ROWS, NUM_BYTES
from tests.emulators.ranks import Rank, run_ranks, this_rank
from tests.emulators.symmetric import SymmetricMemory
from tests.model.rank_threads import ThreadGroup
from tests.tables import rows

CPU = torch.device("cpu")
BF16 = torch.bfloat16
TAKEN = (((1, 8), BF16), ((64, 2880), BF16), ((3, 4), torch.float32), ((MAX_BYTES // 4,), torch.float32))


def on_ranks(size: int, work: Callable[[Any, SymmetricMemory, ThreadGroup], Any]) -> list[Any]:
    """`work(opened, memory, group)` on every rank, where the check at start has passed."""

    def run(rank: Rank) -> Any:
        group, memory = ThreadGroup(rank), SymmetricMemory(rank, NUM_BYTES)
        opened = try_one_shot(group, memory, CPU)
        assert isinstance(opened, OneShotGroup)
        memory.num_sums = memory.num_norms = memory.num_gathers = 0
        opened.all_gather(torch.ones(1))
        group.calls.clear()
        return work(opened, memory, group)

    return run_ranks(size, run)


def on_two_ranks(work: Callable[..., None]) -> Callable[..., None]:
    """A test of `work(opened, memory, group)` on each of two ranks; further arguments come from a table."""

    def test(**row: Any) -> None:
        on_ranks(2, functools.partial(work, **row))

    names = list(inspect.signature(work).parameters)[3:]
    test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    )
    return test


@pytest.mark.parametrize("size", [2, 3, 8])
def test_sums_are_those_of_the_group_and_the_same_on_every_rank(size: int) -> None:
    def work(opened: OneShotGroup, memory: SymmetricMemory, group: ThreadGroup) -> list[torch.Tensor]:
        torch.manual_seed(group.rank)
        inputs = [torch.randn(shape, dtype=dtype) for shape, dtype in TAKEN]
        results = [opened.all_reduce(x) for x in inputs]
        assert memory.num_sums == len(TAKEN)
        for x, got in zip(inputs, results, strict=True):
            want = group.all_reduce(x.double())
            assert (got - want).norm() < size * torch.finfo(x.dtype).eps * want.norm()
        return results

    first, *others = on_ranks(size, work)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@rows("shape, dtype", ((MAX_BYTES // 2 + 8,), BF16), ((3,), BF16), ((0, 8), BF16), ((16,), torch.int64))
@on_two_ranks
def test_other_tensors_are_left_to_the_group(opened, memory, group, shape, dtype):
    x = torch.ones(shape, dtype=dtype)
    assert torch.equal(opened.all_reduce(x), torch.full(shape, 2, dtype=dtype))
    assert (memory.num_sums, group.calls) == (0, ["all_reduce"])
    assert opened.empty(shape, dtype, CPU).shape == shape


@on_two_ranks
def test_a_part_that_was_written_in_place_is_not_copied(opened, memory, group):
    """Ranks that copy and ranks that wrote in place sum together; the next sum does not change the result."""
    x = torch.full((4, 8), 1.0 + group.rank, dtype=BF16)
    opened.has_kernels = False
    part = opened.empty((4, 8), BF16, CPU)
    assert part.data_ptr() == opened.empty((2, 2), torch.float32, CPU).data_ptr()
    part.copy_(x)
    summed = opened.all_reduce(part if group.rank else x)
    opened.all_reduce(torch.zeros(4, 8, dtype=BF16))
    assert torch.equal(summed, torch.full((4, 8), 3.0, dtype=BF16))


def add_norm(opened: OneShotGroup, part: torch.Tensor, place: SumPlace) -> torch.Tensor | None:
    """The sum of parts and ones; None where the group leaves it to others. The norm is checked."""
    x, weight = torch.ones(part.shape, dtype=part.dtype), torch.arange(1.0, 1 + part.shape[1])
    pair = opened.add_norm(x, PartialSum(part, opened, place), weight, 1e-3)
    if pair is not None:
        want = torch.nn.functional.rms_norm(pair[0].float(), weight.shape, weight, 1e-3)
        assert torch.allclose(pair[1], want.to(part.dtype), rtol=0, atol=0, equal_nan=True)
    return None if pair is None else pair[0]


@pytest.mark.parametrize("size", [2, 3])
def test_sums_with_their_norm_are_those_of_the_group(size: int) -> None:
    """Parts that were written in place, that are copied, and whose rows are further apart than they are long."""

    def work(opened: OneShotGroup, memory: SymmetricMemory, group: ThreadGroup) -> None:
        for step in range(6):
            place = SumPlace(step % 2)
            numbers = (torch.arange(4 * 16).view(4, 16) + step) % 13 + group.rank
            part = opened.empty((4, 16), BF16, CPU, place).copy_(numbers)
            own = [part, numbers.to(BF16), torch.nn.functional.pad(numbers.to(BF16), (0, 8))[:, :16]]
            summed = add_norm(opened, own[step % 3], place)
            assert summed is not None
            assert torch.equal(summed, 1 + group.all_reduce(numbers).to(BF16))
        assert (memory.num_norms, memory.num_sums) == (6, 0)

    on_ranks(size, work)


@on_two_ranks
def test_a_place_is_used_again_after_another_collective_alone(opened, memory, group):
    """Else a rank would write its next part while another still reads."""
    attention, mlp = SumPlace
    part = torch.ones(2, 8, dtype=BF16)
    begin = {place: opened.empty((2, 8), BF16, CPU, place).data_ptr() for place in SumPlace}
    for other in (
        lambda: add_norm(opened, part, mlp),
        lambda: opened.all_reduce(part),
        lambda: opened.all_reduce(torch.ones(MAX_BYTES)),
        lambda: opened.all_gather(part),
        lambda: opened.reduce_scatter(part),
    ):
        assert add_norm(opened, part, attention) is not None
        assert add_norm(opened, part, attention) is None
        assert opened.empty((2, 8), BF16, CPU, attention).data_ptr() not in begin.values()
        assert opened.all_reduce(torch.ones(0, 8)).numel() == 0  # waits for nobody
        assert add_norm(opened, part, attention) is None
        other()
        assert opened.empty((2, 8), BF16, CPU, attention).data_ptr() == begin[attention]


@rows("shape, dtype", ((MAX_ROWS + 1, 8), BF16), ((2, MAX_BYTES // 4 + 8), BF16), ((0, 8), BF16), ((2, 8), torch.half))
@on_two_ranks
def test_what_is_too_large_or_of_another_dtype_takes_two_kernels(opened, memory, group, shape, dtype):
    delta = PartialSum(torch.ones(shape, dtype=dtype), opened, SumPlace.MLP)
    assert add_norm(opened, delta.part, delta.place) is None
    assert torch.equal(delta.added_up(), torch.full(shape, 2, dtype=dtype))
    assert memory.num_norms == 0


@pytest.mark.parametrize("norms", [True, False])
def test_a_rank_that_gives_up_takes_part_in_the_sum_of_the_others(norms: bool) -> None:
    def work(opened: OneShotGroup, memory: SymmetricMemory, group: ThreadGroup) -> torch.Tensor:
        opened.has_kernels = norms
        delta = PartialSum(torch.ones(2, 8, dtype=BF16), opened, SumPlace.MLP)
        if group.rank == 1:
            delta.give_up()
            return torch.ones(1)
        summed = add_norm(opened, delta.part, delta.place)
        return delta.added_up() if summed is None else summed

    first, _ = on_ranks(2, work)
    assert first.isnan().all()


@on_two_ranks
def test_a_sum_without_anything_to_add_it_to(opened, memory, group):
    part = opened.empty((2, 8), BF16, CPU, SumPlace.MLP).fill_(1 + group.rank)
    pair = opened.add_norm(None, PartialSum(part, opened, SumPlace.MLP), torch.ones(8), 1e-3)
    assert pair is not None
    assert torch.equal(pair[0], torch.full((2, 8), 3.0, dtype=BF16))
    assert memory.num_norms == 1


@rows("width, num_columns", (8, 16), (8, 13), (8, 8), (BLOCK + 1, 2 * BLOCK + 2))
@on_two_ranks
def test_columns_of_all_ranks_stand_side_by_side(opened, memory, group, width, num_columns):
    num_own = max(0, min(width, num_columns - group.rank * width))
    for step in range(3):
        own = torch.arange(3.0 * num_own).view(3, num_own) + 1000 * group.rank + step
        got, want = (torch.full((3, num_columns), float("nan")) for _ in "ab")
        opened.all_reduce(torch.ones(1, 8))
        opened.gather_columns(own, got, width)
        gather_then_place(group, own, want, width)
        assert torch.equal(got, want)
    assert memory.num_gathers == 3


@on_two_ranks
def test_columns_that_the_kernel_does_not_take_are_left_to_the_group(opened, memory, group):
    """Too many, of another dtype or form, and those of a second gathering without a collective in between."""
    most_rows = MAX_COLUMN_BYTES // (2 * 4 * BLOCK)

    def gather(num_rows: int, width: int, dtype: torch.dtype = torch.float32, step: int = 1) -> bool:
        own, before = torch.full((num_rows, width), 1.0 + group.rank, dtype=dtype), memory.num_gathers
        out = torch.zeros(num_rows, step * 2 * width, dtype=dtype)[:, ::step]
        opened.gather_columns(own, out, width)
        assert torch.equal(out[:, :width], torch.ones_like(own))
        assert torch.equal(out[:, width:], torch.full_like(own, 2))
        return memory.num_gathers > before

    for shape in ((most_rows + 1, BLOCK), (MAX_BLOCKS + 1, 8), (0, 8)):
        assert not gather(*shape)
    assert not gather(2, 8, BF16)
    assert not gather(2, 8, step=2)
    assert gather(most_rows, BLOCK)
    assert not gather(2, 8)
    assert gather(2, 8), "the group's own all-gather came between"
    part = opened.empty((2, 8), BF16, CPU, SumPlace.MLP).fill_(1)
    assert add_norm(opened, part, SumPlace.MLP) is not None
    assert gather(2, 8)
    opened.has_kernels = False
    assert not gather(2, 8)


def fails(*args: object) -> None:
    raise RuntimeError("CUDA driver error: no peer access\nmore")


def break_memory(memory: SymmetricMemory, name: str) -> None:
    """Let a method fail or, for `sum`, give a wrong number, after it has met the other ranks."""
    method = getattr(memory, name)

    def broken(*args: Any) -> Any:
        result: Any = method(*args)
        if name == "gather_columns":
            args[1][-1, -1] += 1
        if name == "add_norm":
            return result[0], result[1] + (result[1].shape[0] == MAX_ROWS)
        return result + 1 if name == "sum" else None if name == "gather_columns" else fails()

    setattr(memory, name, broken)


def broken_group(rank: Rank, fault: str) -> tuple[Any, ThreadGroup]:
    """What is opened where something is broken on the second rank, and the group itself."""
    group, memory = ThreadGroup(rank), SymmetricMemory(rank, NUM_BYTES)
    if rank.rank() == 1 and fault != "host":
        break_memory(memory, fault)
    return try_one_shot(group, memory, CPU), group


@rows(
    "fault, reason",
    ("allocate", "CUDA driver error: no peer access"),
    ("connect", "CUDA driver error: no peer access"),
    ("sum", "a one-shot sum of 16 bytes of torch.bfloat16 is wrong"),
    ("host", "the ranks are on several hosts, host-0 and host-1"),
)
def test_what_fails_on_one_rank_leaves_all_to_the_group_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str, reason: str
) -> None:
    caplog.set_level(logging.INFO, one_shot.__name__)
    if fault == "host":
        monkeypatch.setattr("socket.gethostname", lambda: f"host-{this_rank().rank()}")
    for opened, group in run_ranks(2, lambda rank: broken_group(rank, fault)):
        assert opened is group
    prefix = "sums over 2 tensor-parallel ranks are left to NCCL: "
    assert sorted(caplog.messages) == sorted([prefix + reason, prefix + "it does not work on another rank"])


@rows(
    "fault, reason",
    ("prepare_kernels", "CUDA driver error: no peer access"),
    ("add_norm", "the norm of a sum of (256, 2048) in torch.bfloat16 is wrong"),
    ("gather_columns", "1 rows of 32 columns are gathered wrongly"),
)
def test_where_norms_fail_all_ranks_sum_as_before(caplog: pytest.LogCaptureFixture, fault: str, reason: str) -> None:
    caplog.set_level(logging.WARNING, one_shot.__name__)

    def run(rank: Rank) -> None:
        opened, group = broken_group(rank, fault)
        part = torch.ones(2, 8, dtype=BF16)
        assert add_norm(opened, part, SumPlace.MLP) is None
        group.calls.clear()
        assert torch.equal(opened.all_reduce(part), 2 * part)
        assert group.calls == []

    run_ranks(2, run)
    prefix = "a sum over 2 tensor-parallel ranks and its norm are two kernels, and NCCL gathers logits: "
    assert sorted(caplog.messages) == sorted([prefix + reason, prefix + "it does not work on another rank"])


def test_what_works_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, one_shot.__name__)
    on_ranks(2, lambda opened, memory, group: opened)
    norms = "a sum of up to 256 rows over 2 tensor-parallel ranks and its norm are one kernel"
    assert sorted(caplog.messages) == [
        *[f"{norms}, and so is gathering logits"] * 2,
        *["sums of up to 1024 KiB over 2 tensor-parallel ranks take one kernel"] * 2,
    ]


@on_two_ranks
def test_only_ranks_whose_kernels_norm_sums_have_boxes_for_tokens(opened, memory, group):
    boxes = TokenMail(addresses=(0, 64), rank=group.rank, num_boxes=4)
    memory.mail = lambda: boxes
    assert opened.has_kernels
    assert opened.mail is boxes
    opened.has_kernels = False
    assert opened.mail is SINGLE_RANK.mail is TorchGroup().mail is None
