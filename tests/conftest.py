"""For all tests: a fixed number of threads, and the same random numbers and examples in every run and order."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# A limit on the time of one example would fail on a busy machine.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="session")
def _fixed_number_of_threads() -> Iterator[None]:
    """One, or OMP_NUM_THREADS: sums depend on it, and small matrices gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _fixed_random_numbers() -> None:
    """Those of torch's own generator; most tests draw from one of their own."""
    torch.manual_seed(0)
