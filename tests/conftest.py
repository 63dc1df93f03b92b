"""For all tests: a fixed number of threads, and the same random numbers and examples in every run and order.

With several workers the slowest files start first, so that no worker is left alone with one of them at the end, and all
files that ask the service with the bundled model run in one worker, so that it starts once. So do the files that import
FlashInfer, which takes three CPU seconds.
Python's garbage collector rests while test files are imported, never walks what they brought, and comes less often than
it would: its walks would take a fifth of the time of every worker.
Fixtures import torch for themselves, since the process that gives work to the workers runs none.
"""

import functools
import gc
import os
import re
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.interpreter import Interpreter, RunInterpreted

# A limit on the time of one example would fail on a busy machine.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")

SLOWEST_FIRST = (
    "test_checkpoint_files.py", "test_bundled.py", "test_compile.py", "test_triton_attention.py", "test_life.py",
    "test_api_workers.py", "test_deepseek_files.py", "test_schema.py", "test_interpreted.py", "test_grammar_process.py",
    "test_soak.py", "test_start.py", "test_bundled_deepseek.py", "test_card_end_to_end.py", "test_sampling_kernels.py",
    "test_end_to_end.py", "test_grammar_bundled.py", "test_model_source.py", "test_ranks_processes.py",
)  # fmt: skip
"""The first two begin the groups of files that import FlashInfer and that ask the bundled service."""

IMPORT_FLASHINFER = (
    "test_checkpoint_files.py", "test_doctor.py", "test_flashinfer_attention.py", "test_moe_transports.py",
    "test_router_dtype.py", "test_support_table.py",
)  # fmt: skip
"""Beside all of tests/moe but tests/moe/kernels. A file that is missing here costs the time of an import, no more."""

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

gc.disable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "LoadFileScheduling | None":
    """`--dist loadfile`, but the files that ask the bundled service count as one, and those that import FlashInfer."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    @functools.cache
    def group_of(file: str) -> str:
        path = config.rootpath / file
        if path.parent.name == "clients" or "bundled_url" in path.read_text(encoding="utf-8"):
            return "bundled_url"
        is_moe = file.startswith("tests/moe/") and path.parent.name != "kernels"
        return "flashinfer" if is_moe or path.name in IMPORT_FLASHINFER else file

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(super()._split_scope(nodeid))

    return Scheduling(config, log)


def pytest_configure() -> None:
    """Under `nohup`, have the processes that tests start heed SIGHUP, which they would inherit as ignored.

    A handler that does nothing keeps the tests themselves alive as well, and no child inherits it.
    """
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda _sig, _frame: None)


def pytest_collection_finish() -> None:
    """From here on what tests make is collected."""
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the slowest files to the front."""
    items.sort(key=lambda item: SLOWEST_FIRST.index(item.path.name) if item.path.name in SLOWEST_FIRST else 99)


@pytest.fixture(autouse=True, scope="session")
def _fixed_number_of_threads() -> Iterator[None]:
    """One, or OMP_NUM_THREADS: sums depend on it, and small matrices gain nothing from more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _fixed_random_numbers() -> None:
    """Those of torch's own generator; most tests draw from one of their own."""
    from tests.seed import seed_torch

    seed_torch()


@pytest.fixture(scope="session")
def run_interpreted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunInterpreted]:
    """Runs a program in Triton's interpreter."""
    interpreter = Interpreter(tmp_path_factory.mktemp("interpreter"))
    yield interpreter.run
    interpreter.close()


@pytest.fixture(scope="session")
def bundled_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address, without /v1, of the real service with the bundled model; at the end it must end well."""
    import torch

    from tests.server.service_process import start_bundled  # not for all tests: it imports a web framework

    flags = ("--max-num-seqs", "16", "--access-log", "--expert-load")
    with start_bundled(tmp_path_factory.mktemp("service"), *flags) as service:
        yield service.url
        service.signal(signal.SIGTERM)
        assert service.process.wait(20) == 0
        backend, device = ("triton", "cuda") if torch.cuda.is_available() else ("torch", "cpu")
        assert f'"device": "{device}' in service.out
        assert f"6 MoE layers by {backend} / none / mxfp4" in service.out
        assert len(service.out.splitlines()) == 1, "all but the line about the start belongs on stderr"
        assert re.search(r"^\d{4}-\S+ \S+ INFO uvicorn.access: ", service.err, re.MULTILINE)
