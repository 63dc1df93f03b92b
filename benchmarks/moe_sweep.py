"""Search of launch plans for the triton backend: every plan is compiled, compared with the twin, then timed.

Processes share the work. Each compiles and checks the plans of its group; once all have done that, one after the other
times its plans, alone on the card. The parent gives out the turns, so a process that dies or hangs stops no other.
"""

import contextlib
import dataclasses
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Semaphore
from typing import Any

import torch

from benchmarks import moe_contenders, moe_measure
from benchmarks.moe_cases import id_sets, random_experts
from benchmarks.moe_check import Expected, check
from benchmarks.moe_contenders import Contender
from benchmarks.moe_groups import PREPARING, Group
from benchmarks.moe_measure import Row, expect_random, routing_fields
from benchmarks.moe_plans import candidates
from benchmarks.moe_timing import Timer
from moe.formats import ExpertWeights
from moe.kernels.launch import Layer, run_layer
from moe.kernels.plan import Plan
from moe.routing import StandardTopK

LONGEST_COMPILE_S = 480.0  # of all groups together
LONGEST_TIMING_S = 120.0  # of one group
LONGEST_PREPARE_S = 60.0  # that a process waits for others before it prepares its layer all the same


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSettings:
    """How plans are timed. `kinds` of routing; the seed makes the tokens that outputs are compared for."""

    kinds: list[str]
    num_sets: int
    seed: int
    device: str = "cuda"


class Planned(Contender):
    """Our kernels, launched by one plan."""

    is_ours = True

    def __init__(self, layers: list[Layer], plan: Plan) -> None:
        super().__init__("triton", layers[0])
        self.layers = layers
        self._plan = plan

    def run(self, copy: int, x_TH: torch.Tensor, routing: StandardTopK) -> torch.Tensor:
        out_TH = torch.empty_like(x_TH)
        run_layer(x_TH, routing.ids, routing.weights, self.layers[copy], self._plan, out_TH)
        return out_TH


@dataclass(kw_only=True)
class _Case:
    """One number of tokens; `errors` holds the plans that are right."""

    expected: Expected
    sets: dict[str, list[StandardTopK]]
    errors: dict[Plan, float] = field(default_factory=dict)


class GroupSearch:
    """The search of one group, in its process: `prepare`, `compile`, then `rows`."""

    def __init__(self, group: Group, settings: SearchSettings) -> None:
        self.group, self.settings = group, settings
        self.device = torch.device(settings.device)
        self.failures: list[Row] = []
        self._layers: list[Layer] = []
        self._cases: dict[int, _Case] = {}

    def prepare(self) -> None:
        """The layer, and what the twin makes of every number of tokens; the canonical weights are let go."""
        group = self.group
        experts = random_experts(group.case, group.format_name, self.device, seed=0)
        contender = moe_contenders.prepare("triton", group.case, experts, self.device)
        for num_tokens in group.tokens:
            self._cases[num_tokens] = self._case(experts, num_tokens)
        del experts
        torch.cuda.empty_cache()
        contender.grow(max(map(group.num_copies, group.tokens)))
        self._layers = [info.layer for info in contender.layers]

    def _case(self, experts: ExpertWeights, num_tokens: int) -> _Case:
        case, settings = self.group.case, self.settings
        sets = {kind: id_sets(case, num_tokens, kind, self.device, settings.num_sets) for kind in settings.kinds}
        return _Case(expected=expect_random(case, experts, sets[settings.kinds[0]][0], settings.seed), sets=sets)

    def compile(self) -> None:
        """Call every plan and compare what it computes."""
        for num_tokens, case in self._cases.items():
            for plan in candidates(self.group.case, num_tokens, self.group.format_name):
                try:
                    case.errors[plan] = check(Planned(self._layers, plan), case.expected)
                except ValueError as error:
                    self._wrong(num_tokens, f"{_brief(plan)}: {error}")
                except Exception as error:  # too much shared memory, say: not a candidate
                    self._left_out(num_tokens, plan, error)
            if not case.errors:
                self._wrong(num_tokens, "no plan launches and is right")
            torch.cuda.empty_cache()

    def rows(self) -> Iterator[Row]:
        """A row per number of tokens, right plan and kind of routing."""
        group = self.group
        for num_tokens, case in self._cases.items():
            fields = {
                kind: routing_fields(group.case, group.format_name, kind, topks) for kind, topks in case.sets.items()
            }
            row: Row = {
                "model": group.model, "format": group.format_name, "tokens": num_tokens, "backend": "triton",
            }  # fmt: skip
            for plan, error in case.errors.items():
                try:
                    times = self._times(case, plan, group.num_copies(num_tokens))
                except Exception as broken:
                    self._left_out(num_tokens, plan, broken)
                    continue
                for kind, us in times.items():
                    yield row | fields[kind] | {"plan": dataclasses.asdict(plan), "us": us, "error": error}

    def _times(self, case: _Case, plan: Plan, num_copies: int) -> dict[str, float]:
        """Microseconds by kind of routing: medians over the id sets."""
        some = case.sets[self.settings.kinds[0]]
        timer = Timer(Planned(self._layers, plan), case.expected.x_TH, some, num_copies)
        times = {kind: round(timer.us(topks), 2) for kind, topks in case.sets.items()}
        del timer
        torch.cuda.empty_cache()  # what the graph held: other processes share the card
        return times

    def _wrong(self, num_tokens: int, reason: str) -> None:
        print(f"wrong: {self.group.model} {self.group.format_name} {num_tokens}: {reason}", flush=True)
        self.failures.append(failure(self.group, reason, num_tokens))

    def _left_out(self, num_tokens: int, plan: Plan, error: Exception) -> None:
        reason = f"{type(error).__name__}: {str(error)[:160]}"
        where = f"{self.group.model} {self.group.format_name} {num_tokens}: {_brief(plan)}"
        print(f"left out: {where}: {reason}", flush=True)


def _brief(plan: Plan) -> str:
    """What is not as usual."""
    fields = [(field, getattr(plan, field.name)) for field in dataclasses.fields(plan)]
    return " ".join(f"{field.name}={value}" for field, value in fields if value != field.default)


def failure(group: Group, reason: str, num_tokens: int | None = None) -> Row:
    """The failure of a whole group, or of one of its token counts."""
    return moe_measure.failure(group.model, group.format_name, "triton", num_tokens or list(group.tokens), reason)


def search_in_process(group: Group, settings: SearchSettings, connection: Connection, preparing: Semaphore) -> None:
    """One process. Sends None when its plans are compiled, waits for its turn, sends (rows, failures).

    Sends the reason as text instead, and ends, when it cannot go on.
    """
    try:
        torch.set_num_threads(1)
        search = GroupSearch(group, settings)
        has_slot = preparing.acquire(timeout=LONGEST_PREPARE_S)
        try:
            search.prepare()
        finally:
            if has_slot:
                preparing.release()
        search.compile()
        connection.send(None)
        connection.recv()
        connection.send((list(search.rows()), search.failures))
    except (EOFError, ConnectionError):  # nobody waits for the rows any more
        return
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        connection.send(f"{type(error).__name__}: {str(error)[:400]} ({where.filename}:{where.lineno})")


@dataclass(kw_only=True)
class _Worker:
    """A process as its parent sees it; `error` is why nothing more comes from it."""

    group: Group
    process: BaseProcess
    connection: Connection
    compiled_s: float = 0.0
    error: str = ""

    def receive(self) -> Any:
        """The next message; None and an error if there is none to come."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(5)
            message = f"its process ended with exit code {self.process.exitcode}"
        if isinstance(message, str):
            self.error, message = message, None
        return message

    def times(self) -> tuple[list[Row], list[Row]]:
        """Let it time its plans: rows and failures."""
        with contextlib.suppress(OSError):  # it has died since: `receive` finds out
            self.connection.send("your turn")
        if not self.connection.poll(LONGEST_TIMING_S):
            self.end(f"not timed after {LONGEST_TIMING_S:.0f} s")
        message = None if self.error else self.receive()
        return message or ([], [])

    def end(self, error: str = "") -> None:
        """No process is left behind."""
        self.error = self.error or error
        self.connection.close()
        if self.process.is_alive():
            self.process.join(0 if self.error else 10)
            self.process.kill()
            self.process.join()


Work = Callable[[Group, SearchSettings, Connection, Semaphore], None]


def search_batch(
    batch: list[Group], settings: SearchSettings, work: Work = search_in_process
) -> tuple[list[Row], list[Row]]:
    """Rows and failures of groups that run at the same time, a process each."""
    context = multiprocessing.get_context("spawn")
    preparing = context.Semaphore(PREPARING)
    workers = []
    for group in batch:
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(group, settings, theirs, preparing), daemon=True)
        process.start()
        theirs.close()  # or its end would not be seen when the process dies
        workers.append(_Worker(group=group, process=process, connection=ours))
    rows: list[Row] = []
    failures: list[Row] = []
    try:
        _wait_until_compiled(workers)
        for worker in workers:
            begin = time.monotonic()
            found, failed = ([], []) if worker.error else worker.times()
            rows, failures = rows + found, failures + failed
            if worker.error:
                failures.append(failure(worker.group, worker.error))
                print(f"{worker.group}: {worker.error}", flush=True)
                continue
            timed = f"{len(found) // len(settings.kinds)} plans timed in {time.monotonic() - begin:.0f} s"
            print(f"{worker.group}: compiled in {worker.compiled_s:.0f} s, {timed}", flush=True)
    finally:
        for worker in workers:
            worker.end()
    return rows, failures


def _wait_until_compiled(workers: list[_Worker]) -> None:
    """Those that do not answer in time are ended: the card must be free while others time."""
    begin = time.monotonic()
    waiting = {worker.connection: worker for worker in workers}
    while waiting:
        answered = wait(list(waiting), max(0.0, begin + LONGEST_COMPILE_S - time.monotonic()))
        for connection in answered:
            worker = waiting.pop(connection)  # type: ignore[call-overload]
            worker.receive()
            worker.compiled_s = time.monotonic() - begin
        if not answered:
            for worker in waiting.values():
                worker.end(f"not compiled after {LONGEST_COMPILE_S:.0f} s")
            break
