"""`DecodeInputs`: what torch fills, the kernel in the interpreter and compiled, and what a wrong kernel leads to."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine import decode_inputs
from engine.cuda_graphs import DecodeGraphs, GraphSettings
from engine.decode_inputs import DecodeInputs
from engine.gpu_inputs import spread_numbers
from engine.step import LATE_ID, StepBatch, StepRow
from engine.step_buffers import StepBuffers
from model.attention.flashinfer import FlashInferAttention
from model.attention.triton import TritonAttention
from moe.group import TokenMail
from tests.engine.fakes import FakeModel
from tests.interpreter import RunInterpreted
from tests.moe.kernels.compiling import compile_kernel, of_hopper_and_others

NO_UPDATES = np.zeros((0, 3), np.int32)


def make_inputs(mail: TokenMail | None = None) -> DecodeInputs:
    """Of four rows at most, pages of four tokens, the spare page is 9; requests in places 0 to 3 chose 100 to 103."""
    buffers = StepBuffers(
        max_tokens=4, max_rows=4, max_model_len=14, page_size=4, spare_page=9, is_sliding=True, counts_live=True,
        device=torch.device("cpu"),
    )  # fmt: skip
    return DecodeInputs(buffers, torch.arange(100, 104), mail)


def step_of(*rows: tuple[int, int, int]) -> StepBatch:
    """A decode step of (place, position, token) each."""
    ids = np.array([token for _, _, token in rows])
    step_rows = [StepRow(place, position, 1, True, 1) for place, position, _ in rows]
    return StepBatch(step_rows, ids, ids, ids, NO_UPDATES, True, ids, NO_UPDATES)


def tables() -> list[np.ndarray]:
    """Places' pages are 10 * place + column; those of sliding layers 100 more."""
    table = (10 * np.arange(4)[:, None] + np.arange(4)).astype(np.int32)
    return [table, table + 100]


def send(inputs: DecodeInputs, *rows: tuple[int, int, int]) -> None:
    """As `step_of`."""
    inputs.send(step_of(*rows), [position + 1 for _, position, _ in rows], tables())


def fill(inputs: DecodeInputs, size: int) -> StepBuffers:
    inputs.spread_by_torch(size)
    return inputs._buffers


def test_rows_have_their_numbers_and_the_others_are_padding() -> None:
    inputs = make_inputs()
    send(inputs, (2, 0, 7), (1, 13, LATE_ID), (3, 4, LATE_ID))
    buffers = fill(inputs, 4)
    assert buffers.ids_M[:3].tolist() == [7, 101, 103]
    assert buffers.positions_M[:3].tolist() == [0, 13, 4]
    assert buffers.lens_M.tolist() == [1, 14, 5, 1]
    assert buffers.pages[0].slots_M.tolist() == [20 * 4, 13 * 4 + 1, 31 * 4, 9 * 4]
    assert buffers.pages[1].slots_M.tolist() == [120 * 4, 113 * 4 + 1, 131 * 4, 9 * 4]
    sliding_pages = [[100 + place * 10 + column for column in range(4)] for place in (2, 1, 3)]
    assert buffers.pages[1].table_MP.tolist() == [*sliding_pages, [9] * 4]
    assert buffers.num_live is not None
    assert buffers.num_live.tolist() == [3]

    send(inputs, (0, 3, 5))
    fill(inputs, 2)
    assert buffers.ids_M[0] == 5
    assert buffers.pages[0].slots_M.tolist() == [3, 36, 31 * 4, 36], "a graph of two rows reads these alone"
    assert buffers.pages[0].table_MP[1].tolist() == [10, 11, 12, 13], "padding reads what it read before"
    inputs.send_nothing()
    fill(inputs, 4)
    assert set(buffers.slots_GM.flatten().tolist()) == {36}
    assert (buffers.lens_M.tolist(), buffers.num_live.tolist()) == ([1] * 4, [0])


def test_buffers_can_be_reset() -> None:
    buffers = make_inputs()._buffers
    before = [tensor.clone() for tensor in buffers.all]
    for tensor in buffers.all:
        tensor.fill_(3)
    buffers.reset()
    assert all(map(torch.equal, buffers.all, before))


def test_the_kernel_fills_what_torch_fills(run_interpreted: RunInterpreted) -> None:
    assert run_interpreted("tests.engine.interpreted_inputs") == {"alone": [], "ranks": [0, 0]}


@pytest.mark.parametrize("fault", [None, "buffers", "another rank"])
def test_a_wrong_kernel_is_found_and_replaced_on_all_ranks(fault: str | None, caplog: pytest.LogCaptureFixture) -> None:
    inputs = make_inputs()

    def spread(num_rows: int) -> None:
        inputs._copy(num_rows)
        inputs._buffers.lens_M[0] += fault == "buffers"

    inputs._spread = spread
    answers = []

    def all_agree(is_so: bool) -> bool:
        answers.append(is_so)
        return is_so and (fault != "another rank" or len(answers) != 3)

    inputs.check(all_agree)
    assert len(answers) == 4, "all ranks ask as often, whatever they find"
    assert (inputs._spread is None) == (fault is not None)
    assert ("is wrong: torch fills them" in caplog.text) == (fault is not None)
    buffers = inputs._buffers
    assert all(map(torch.equal, buffers.all, make_inputs()._buffers.all)), "nothing of the check is left"
    send(inputs, (0, 3, 5))
    inputs.spread_by_torch(1)
    inputs.spread(1)
    assert buffers.ids_M[0] == 5


def test_ranks_have_the_kernel_together_or_not_at_all() -> None:
    inputs = make_inputs()
    inputs._spread = lambda num_rows: None
    inputs.check(lambda is_so: False)
    assert inputs._spread is None


def test_a_kernel_that_does_not_compile_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    inputs, answers = make_inputs(), []

    def spread(num_rows: int) -> None:
        raise OSError("no compiler")

    inputs._spread = spread
    inputs.check(lambda is_so: answers.append(is_so) or is_so)
    assert (inputs._spread, answers) == (None, [False])
    assert "does not run, so torch fills them: no compiler" in caplog.text


def test_tokens_are_delivered_by_the_kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """There must be a kernel, and boxes for as many rows as a step has."""
    mail = TokenMail((0, 0), rank=1, num_boxes=4)
    assert not make_inputs(mail).delivers_tokens, "a CPU has no kernel"
    made = []
    kernels = SimpleNamespace(spreader=lambda *arguments: made.append(arguments[-1]) or (lambda num_rows: None))
    monkeypatch.setattr(decode_inputs, "kernel_module", lambda name, device: kernels)
    assert make_inputs(mail).delivers_tokens
    assert not make_inputs().delivers_tokens
    assert not make_inputs(TokenMail((0, 0), rank=1, num_boxes=3)).delivers_tokens
    assert made == [mail, None, None]


def test_no_graph_fills_tables_that_a_plan_reads_before_its_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel in the graph would write them too late: the plan would have the pages of the step before."""
    kernels = SimpleNamespace(spreader=lambda *arguments: lambda num_rows: None)
    monkeypatch.setattr(decode_inputs, "kernel_module", lambda name, device: kernels)
    seen = []

    def replay(graphs: DecodeGraphs) -> Any:
        table = graphs.buffers.pages[0].table_MP
        return SimpleNamespace(replay=lambda query_lens, seq_lens: seen.append(table[0, :2].tolist()))

    for plans_by_tables in (False, True):
        model = FakeModel()
        model.plans_by_tables = plans_by_tables
        settings = GraphSettings(
            model=model, kv=[], logits_MV=torch.zeros(3, model.vocab_size), page_size=4, max_num_seqs=2,
            max_model_len=8, spare_page=9, is_sliding=False,
        )  # fmt: skip
        graphs = DecodeGraphs(settings, torch.zeros(2, dtype=torch.int64))
        graphs._graphs = dict.fromkeys(graphs.sizes, replay(graphs))
        graphs.run(step_of((1, 5, 7)), tables()[:1])
    assert seen == [[9, 9], [10, 11]]
    assert FlashInferAttention.plans_by_tables
    assert not TritonAttention.plans_by_tables


@of_hopper_and_others
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_kernel_compiles(arch: int, num_ranks: int) -> None:
    pointers = {
        "numbers_ptr": "*i32", "tokens_ptr": "*i64", "boxes_ptr": "*i64", "ids_ptr": "*i64", "positions_ptr": "*i64",
        "lens_ptr": "*i32", "slots_ptr": "*i64", "tables_ptr": "*i32", "num_live_ptr": "*i32",
    }  # fmt: skip
    constants = {"PAGE_SIZE": 64, "KINDS": 2, "RANKS": num_ranks, "COUNTS_LIVE": True, "AT_ONCE": 1024}
    kernel = compile_kernel(spread_numbers, arch, pointers, constants, num_warps=4)
    assert "cubin" in kernel.asm
    exchanges = re.findall(r"atom\.\S*exch\S*", kernel.asm["ptx"])
    assert all(".sys" in each for each in exchanges)
    assert bool(exchanges) == (num_ranks > 1)
