"""Counts and slots of routed tokens: what a table promises, and the kernels that fill it in."""

import torch

from moe.placement import Placement
from moe.replicas import NUM_ROWS, ExpertTables, count_and_place, slot_table
from moe.routing import StandardTopK
from tests.interpreter import RunInterpreted, waits_for_interpreter
from tests.tables import rows

PLACEMENT = Placement(((0, 1, 2), (0, 3, 2), (0, 3, 4)))
SLOTS = [{0, 3, 6}, {1}, {2, 5}, {4, 7}, {8}]


@rows("first_row", 0, 1, 5)
def test_neighbouring_tokens_take_the_replicas_in_turn(first_row: int) -> None:
    table = slot_table(PLACEMENT, 5, first_row=first_row)
    for expert, slots in enumerate(SLOTS):
        taken = table[:, expert].tolist()
        assert {taken.count(slot) for slot in slots} == {NUM_ROWS // len(slots)}
        assert set(taken[: len(slots)]) == slots


def test_padding_and_holes_count_for_nobody() -> None:
    ids = torch.tensor([[0, 3], [0, -1], [4, 0], [1, 2]], dtype=torch.int32)
    tables = ExpertTables(torch.zeros(5, dtype=torch.int64), slot_table(PLACEMENT, 5))
    live = torch.tensor([12], dtype=torch.int32)
    placed = count_and_place(StandardTopK(torch.ones(4, 2), ids), tables, live, first_token=10)
    assert tables.load_E.tolist() == [2, 0, 0, 1, 0]
    assert placed.ids[1, 1] == -1
    is_expert = ids >= 0
    assert all(
        slot in SLOTS[e] for slot, e in zip(placed.ids[is_expert].tolist(), ids[is_expert].tolist(), strict=True)
    )


@waits_for_interpreter
def test_the_kernels_do_the_same_in_the_interpreter(run_interpreted: RunInterpreted) -> None:
    faults = run_interpreted("tests.model.interpreted_replicas")
    assert len(faults) == 23
    assert [name for name, is_wrong in faults.items() if is_wrong] == []
