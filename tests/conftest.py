"""For all tests: a fixed number of threads, and random numbers that do not depend on the tests before."""

import os
from collections.abc import Iterator

import pytest
import torch


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
