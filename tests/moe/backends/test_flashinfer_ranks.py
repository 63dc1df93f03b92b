"""Every FlashInfer path over tensor- and expert-parallel sizes: the ranks' parts sum to one rank."""

import functools

import pytest

from tests.moe.backends.scenarios import PATHS, Problem, block_of, install, make_problem, run_ranks, tolerance

SIZES = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8), (2, 4), (8, 8)]  # tp, ep


@functools.cache
def problem(path: str) -> Problem:
    """MXFP4 has 9 blocks, so that ranks differ and some of 8 are empty; the kernels of the others take no empty one."""
    return make_problem(path, 288 if path.startswith("mxfp4") else 8 * block_of(path))


@pytest.mark.parametrize("path", [path for path in PATHS if path != "cutedsl-v1"])  # v1's transport has no tp
def test_all_ranks_sum_to_one(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    emulator = install(monkeypatch, path)
    for tp_size, ep_size in SIZES:
        with subtests.test(tp_size=tp_size, ep_size=ep_size):
            assert run_ranks(emulator, problem(path), tp_size, ep_size) < tolerance(path)
