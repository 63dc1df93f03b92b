"""The cutlass emulator with a list of profiles: times, failures and faults by profile number. For tests of tuning."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from moe.tune import measure as tuning_measure
from tests.emulators import cutlass
from tests.emulators.cutlass import CutlassEmulator, install_cutlass

NUM_FIRST, NUM_SECOND = 5, 4  # numbers 0..4 and 5..8


@dataclass
class Profiled:
    """`seconds[number]` of a call, numbers missing there cost 10; the rest are sets of profile numbers."""

    emulator: CutlassEmulator
    seconds: dict[int, float]
    fails: set[int] = field(default_factory=set)
    wrong: set[int] = field(default_factory=set)
    writes_nothing: set[int] = field(default_factory=set)
    no_occupancy: set[int] = field(default_factory=set)
    shapes: set[tuple[int, int, int]] = field(default_factory=set)
    now_s: float = 0.0

    @property
    def used(self) -> list[list[int]]:
        """Profile numbers of every launch so far."""
        return [list(call.profile_ids) for call in self.emulator.calls]


def install_profiles(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], major: int = 9) -> Profiled:
    """Replace the compiled module and the clock of the measurements until the test ends."""
    state = Profiled(install_cutlass(monkeypatch, major), seconds)
    plain = cutlass._Runner

    class Runner(plain):
        def get_gemm1_tactic_count(self) -> int:
            return NUM_FIRST

        def get_gemm2_tactic_count(self) -> int:
            return NUM_SECOND

        def get_tactic_occupancy(self, number: int) -> int:
            return 0 if number in state.no_occupancy else 1

        def get_valid_tactics_for_shape(self, gemm: int, rows: int, cols: int) -> list[int]:
            state.shapes.add((gemm, rows, cols))
            return list(range(NUM_FIRST) if gemm == 1 else range(NUM_FIRST, NUM_FIRST + NUM_SECOND))

        def run_moe(self, *values: Any) -> None:
            call = SimpleNamespace(**dict(zip(cutlass.ARGUMENTS, values, strict=True)))
            first, second = (
                own if own >= 0 else default for own, default in zip(call.profile_ids, (0, NUM_FIRST), strict=True)
            )
            chosen = {first, second}
            assert first < NUM_FIRST <= second < NUM_FIRST + NUM_SECOND, "the binding refuses other numbers"
            if chosen & state.fails:
                raise RuntimeError("this tile was not compiled")
            state.now_s += sum(state.seconds.get(number, 10.0) for number in chosen)
            if chosen & state.writes_nothing:
                state.emulator.calls.append(call)
                return
            super().run_moe(*values)
            if chosen & state.wrong:
                call.output[-1, :64] += 1.0

    monkeypatch.setattr(cutlass, "_Runner", Runner)
    for name in ("_ROUNDS", "_MANY_INPUTS", "_FEW_INPUTS"):  # times are exact here, and the emulator is slow
        monkeypatch.setattr(tuning_measure, name, 1)
    monkeypatch.setattr(tuning_measure, "time", SimpleNamespace(perf_counter=lambda: state.now_s))
    return state
