"""For all tests: a fixed number of threads, and the same random numbers and examples in every run and order.

With several workers the slowest files start first, so that no worker is left alone with one of them at the end.
"""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# A limit on the time of one example would fail on a busy machine.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")

SLOWEST_FIRST = (
    "test_interpreted.py", "test_card_end_to_end.py", "test_soak.py", "test_interpreted_probes.py", "test_life.py",
    "test_api_workers.py", "test_triton_attention.py", "test_bundled.py", "test_moe_sweep.py",
    "test_permuted_scales.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the slowest files to the front."""
    items.sort(key=lambda item: SLOWEST_FIRST.index(item.path.name) if item.path.name in SLOWEST_FIRST else 99)


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
