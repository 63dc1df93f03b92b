"""`OneShotGroup` over emulated symmetric memory: which sums take the kernel, what they are, and what turns it off."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe import one_shot
from moe.one_shot import MAX_BYTES, OneShotGroup, try_one_shot
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
        group, memory = ThreadGroup(rank), SymmetricMemory(rank, MAX_BYTES)
        opened = try_one_shot(group, memory, CPU)
        assert isinstance(opened, OneShotGroup)
        group.calls.clear()
        memory.num_sums = 0
        return work(opened, memory, group)

    return run_ranks(size, run)


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
def test_other_tensors_are_left_to_the_group(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def work(opened: OneShotGroup, memory: SymmetricMemory, group: ThreadGroup) -> None:
        x = torch.ones(shape, dtype=dtype)
        assert torch.equal(opened.all_reduce(x), torch.full(shape, 2, dtype=dtype))
        assert (memory.num_sums, group.calls) == (0, ["all_reduce"])
        assert opened.empty(shape, dtype, CPU).shape == shape

    on_ranks(2, work)


def test_a_part_that_was_written_in_place_is_not_copied() -> None:
    """Ranks that copy and ranks that wrote in place sum together; the next sum does not change the result."""

    def work(opened: OneShotGroup, memory: SymmetricMemory, group: ThreadGroup) -> None:
        x = torch.full((4, 8), 1.0 + group.rank, dtype=BF16)
        part = opened.empty((4, 8), BF16, CPU)
        assert part.data_ptr() == opened.empty((2, 2), torch.float32, CPU).data_ptr()
        part.copy_(x)
        summed = opened.all_reduce(part if group.rank else x)
        opened.all_reduce(torch.zeros(4, 8, dtype=BF16))
        assert torch.equal(summed, torch.full((4, 8), 3.0, dtype=BF16))

    on_ranks(2, work)


def fails(*args: object) -> None:
    raise RuntimeError("CUDA driver error: no peer access\nmore")


def break_memory(memory: SymmetricMemory, name: str) -> None:
    """Let a method fail or, for `sum`, give a wrong number, after it has met the other ranks."""
    method = getattr(memory, name)

    def broken(*args: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = method(*args)
        return result + 1 if name == "sum" else fails()  # type: ignore[func-returns-value]

    setattr(memory, name, broken)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("allocate", "CUDA driver error: no peer access"),
        ("connect", "CUDA driver error: no peer access"),
        ("sum", "a one-shot sum of 16 bytes of torch.bfloat16 is wrong"),
        ("host", "the ranks are on several hosts, host-0 and host-1"),
    ],
)
def test_what_fails_on_one_rank_leaves_all_to_the_group_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str, reason: str
) -> None:
    caplog.set_level(logging.INFO, one_shot.__name__)
    if fault == "host":
        monkeypatch.setattr("socket.gethostname", lambda: f"host-{this_rank().rank()}")

    def run(rank: Rank) -> bool:
        group, memory = ThreadGroup(rank), SymmetricMemory(rank, MAX_BYTES)
        if rank.rank() == 1 and fault != "host":
            break_memory(memory, fault)
        return try_one_shot(group, memory, CPU) is group

    assert run_ranks(2, run) == [True, True]
    prefix = "sums over 2 tensor-parallel ranks are left to NCCL: "
    assert sorted(caplog.messages) == sorted([prefix + reason, prefix + "it does not work on another rank"])


def test_what_works_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, one_shot.__name__)
    on_ranks(2, lambda opened, memory, group: opened)
    assert caplog.messages == ["sums of up to 1024 KiB over 2 tensor-parallel ranks take one kernel"] * 2
