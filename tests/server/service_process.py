"""The service as a process of its own: with the bundled model, or around the engine tests' scripted engine."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx2

from tests.server.conftest import ASSETS, wait_until

ROOT = Path(__file__).resolve().parents[2]
API_WORKERS = "API_WORKERS"
"""Environment variable: with how many HTTP processes the tests start services that do not say it themselves."""

PLAIN = "import sys; from server.start import main; sys.exit(main())"
SCRIPTED = """
import functools, sys
import engine.client
import server.service
from server.start import main
server.service.EngineClient = functools.partial(engine.client.EngineClient, worker_module="tests.engine.fake_worker")
sys.exit(main())
"""


class ServiceProcess:
    """A running service; output in files."""

    def __init__(self, process: subprocess.Popen, folder: Path) -> None:
        self.process = process
        self._folder = folder

    @property
    def out(self) -> str:
        return _read(self._folder / "out")

    @property
    def err(self) -> str:
        return _read(self._folder / "err")

    @property
    def url(self) -> str:
        """The address, once the service is ready."""
        wait_until(lambda: "ready at" in self.out or self.process.poll() is not None, 120)
        found = re.search(r"ready at (http://127.0.0.1:\d+)/v1", self.out)
        assert found, self.err
        return found[1]

    @property
    def engine_pid(self) -> int:
        return next(pid for pid in self.children if _runs(pid, "engine.worker", "fake_worker", "faulty_worker"))

    @property
    def api_pids(self) -> list[int]:
        """HTTP processes, without the supervisor."""
        return [pid for pid in self.children if _runs(pid, "server.api_worker")]

    @property
    def children(self) -> list[int]:
        folder = Path(f"/proc/{self.process.pid}/task/{self.process.pid}")
        return [int(pid) for pid in (folder / "children").read_text().split()]

    def http(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=30, verify=False)

    def signal(self, sig: signal.Signals) -> None:
        self.process.send_signal(sig)


def model_folder(folder: Path, kind: str) -> Path:
    """A checkpoint without weights; its name tells the scripted engine how to behave."""
    model = folder / kind
    model.mkdir(parents=True)
    for file in ASSETS.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, model)
    return model


@contextmanager
def start(
    folder: Path, kind: str = "slow", *argv: str, code: str = SCRIPTED, flags: tuple[str, ...] = (), **popen: object
) -> Iterator[ServiceProcess]:
    """The process; killed at the end, with its engine, if it still runs."""
    model = model_folder(folder, kind)
    command = [sys.executable, *flags, "-c", code, "--port", "0", "--model", str(model), *argv]
    if API_WORKERS in os.environ and "--api-workers" not in argv:
        command += ["--api-workers", os.environ[API_WORKERS]]
    with run(command, folder, **popen) as service:
        yield service


@contextmanager
def start_bundled(folder: Path, *argv: str) -> Iterator[ServiceProcess]:
    """The real engine; with the bundled model, unless `argv` names another."""
    command = [sys.executable, "-m", "server", "--port", "0", "--num-threads", "1", *argv]
    with run(command, folder, env=os.environ | {"OMP_NUM_THREADS": "1"}) as service:
        yield service


@contextmanager
def run(command: list[str], folder: Path, **popen: object) -> Iterator[ServiceProcess]:
    """The process; killed at the end, if it still runs."""
    files = {"stdout": folder / "out", "stderr": folder / "err"}
    options = {name: popen.pop(name, file) for name, file in files.items()}
    with ExitStack() as stack:
        streams = {name: stack.enter_context(open(file, "w")) for name, file in options.items()}
        process = stack.enter_context(subprocess.Popen(command, cwd=ROOT, **streams, **popen))
        stack.callback(process.kill)
        yield ServiceProcess(process, folder)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (FileNotFoundError, ProcessLookupError):  # the process may end at any moment
        return ""


def _runs(pid: int, *modules: str) -> bool:
    """Whether a process of ours runs one of these modules."""
    return any(module in _read(Path(f"/proc/{pid}/cmdline")) for module in modules)


def free_port() -> int:
    """A port for a service that cannot say which one it took."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def health(http: httpx2.Client) -> int | None:
    """Status of `/health`; None while nobody listens."""
    with suppress(httpx2.TransportError):
        return http.get("/health").status_code
    return None


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or dead and not yet waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
