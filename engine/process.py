"""Starts and ends a process of the service, such as the engine's. Knows nothing of requests.

A fresh interpreter runs the worker module: nothing of the parent is forked, and its main module is not imported again.
The child gets the parent's module search path and a session of its own, so that Ctrl-C in the terminal does not reach
it; its standard input stays open as long as the parent lives.
"""

import asyncio
import contextlib
import os
import pickle
import sys
from collections.abc import Sequence

_BOOT = "import runpy, sys; sys.path[:] = sys.argv[2:]; runpy.run_module(sys.argv[1], run_name='__main__')"
# Huge pages for large tensors: filling fresh memory with weights takes half the time (one page fault for 512).
# Huge pages for smaller allocations, which come from malloc: a CPU reads packed weights that exceed its cache faster.
# Torch's C++ warnings that a connection has ended come with 20 lines of traces; the process that reads it says so.
# Symmetric memory without multicast, which nothing here uses and many virtual machines lack.
_ENVIRONMENT = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
_POLITE_S = 3.0  # time to finish a step and exit
_INPUT_CLOSED_S = 1.0  # a thread watches standard input, even if the step loop hangs


def module_command(module: str) -> list[str]:
    """Run `module` as a program in a fresh interpreter with this one's module search path."""
    return [sys.executable, "-P", "-c", _BOOT, module, *sys.path]


class WorkerProcess:
    """One process that runs a module of ours."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, module: str, setup: object, pass_fds: Sequence[int] = ()) -> "WorkerProcess":
        """Run `module` as a program, hand it `setup`, pickled, and keep these descriptors open in it."""
        process = await asyncio.create_subprocess_exec(
            *module_command(module), stdin=asyncio.subprocess.PIPE, start_new_session=True,
            env={**_ENVIRONMENT, **os.environ}, pass_fds=pass_fds,
        )  # fmt: skip
        if process.stdin is None:
            raise RuntimeError(f"the process of {module} has no standard input")
        order = pickle.dumps(setup)
        with contextlib.suppress(RuntimeError, ConnectionError):  # it has ended already, and `wait` says how
            process.stdin.write(order)
        return cls(process)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """True until the process has ended and that was noticed."""
        return self._process.returncode is None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def wait(self) -> int:
        """Exit status, once there is one; negative for a signal."""
        return await self._process.wait()

    async def end(self, *, told_to_stop: bool, at_once: bool = False) -> bool:
        """End the process: wait a few seconds if it was told to stop, then close its standard input, then kill it.

        `at_once` skips the waiting. Returns True if the process had to be killed.
        """
        if told_to_stop and not at_once:
            await self._wait(_POLITE_S)
        if self._process.stdin is not None:
            self._process.stdin.close()
        if not at_once:
            await self._wait(_INPUT_CLOSED_S)
        was_running = self.is_running
        if was_running:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        return was_running

    async def _wait(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), timeout_s)


def describe_exit(status: int) -> str:
    """How a process ended, in words."""
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


def exit_with_parent() -> None:
    """Block until standard input closes, then end at once; there is nobody left to tell, or to tidy up."""
    while os.read(0, 1):  # the descriptor itself: a lock of `sys.stdin` must not be held when the interpreter ends
        pass
    os._exit(0)
