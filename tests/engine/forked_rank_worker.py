"""Process of a rank that is forked where torch and the emulators are imported already, which takes seconds.

`ForkServer` is that process. A rank's own process, which the engine starts as any other, only hands its descriptors and
environment over, waits, and ends as the forked one does. Faults of processes are tested without it.
"""

import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module

VARIABLE = "FORK_SERVER"  # in the environment: the server's address
_MESSAGE_BYTES = 1 << 20
_MOST_DESCRIPTORS = 16


class ForkServer:
    """Forks ranks that run `module`'s `run()`; a context manager, which gives the value of the variable."""

    def __init__(self, module: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("")  # a name of the kernel's choice
        self._listener.listen(16)
        self._command = [sys.executable, "-m", __spec__.name, module, str(self._listener.fileno())]

    def __enter__(self) -> str:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, pass_fds=[self._listener.fileno()], start_new_session=True
        )
        address = self._listener.getsockname().decode()[1:]
        self._listener.close()
        return address

    def __exit__(self, *error: object) -> None:
        self._process.communicate()


def _serve(module: str, listener: socket.socket) -> None:
    """Until standard input closes."""
    run = import_module(module).run
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who ends is forgotten
    while 0 not in select.select([0, listener], [], [])[0]:
        link, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _fork_rank(run, link)
        link.close()


def _fork_rank(run: Callable[[], None], link: socket.socket) -> None:
    """Tells the waiting process how the rank has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    packed, received, _, _ = socket.recv_fds(link, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
    pid = os.fork()
    if pid == 0:
        environment, numbers = pickle.loads(packed)
        link.close()
        _take_over(environment, dict(zip(numbers, received, strict=True)))
        status = 1
        try:
            run()
            status = 0
        except SystemExit as ending:
            status = int(ending.code or 0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(status)
    for descriptor in received:
        os.close(descriptor)
    link.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)


def _take_over(environment: dict[str, str], descriptors: dict[int, int]) -> None:
    """Give this process the environment and the descriptors, under their numbers, of the one that waits."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    spare = {number: os.dup(received) for number, received in descriptors.items()}  # none of them has a number to come
    while set(spare.values()) & set(descriptors):
        spare = {number: os.dup(each) if each in descriptors else each for number, each in spare.items()}
    for number, each in spare.items():
        os.dup2(each, number)
        os.close(each)


def _wait() -> int:
    """The rank's own process: exit status of the forked one."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    numbers = [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")]  # not the listing's own
    with socket.socket(socket.AF_UNIX) as link:
        link.connect("\0" + os.environ[VARIABLE])
        socket.send_fds(link, [pickle.dumps((dict(os.environ), numbers))], numbers)
        status = int(link.recv(16) or 1)
    if status < 0:
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2].isdigit():
        _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
    else:
        raise SystemExit(_wait())
