"""The real service in its own processes, and what can be seen of it from outside: memory and metrics."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2

from tests.server.service_process import start_bundled
from tests.soak.bodies import LEAVERS_MODEL, MODEL


class Service:
    """A running service."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid

    def resident_mib(self) -> dict[str, float]:
        """Memory of the HTTP process and of the engine's processes together, in MiB."""
        engines = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return {"http": _resident_mib(self.pid), "engine": sum(_resident_mib(int(each)) for each in engines)}

    def metrics(self, model: str = MODEL) -> dict[str, float]:
        """Sums over all labels of the samples of one served name."""
        sums: dict[str, float] = {}
        text = httpx2.get(f"{self.url}/metrics", verify=False).text
        for name, labels, value in re.findall(r"^(\w+)\{(.*)\} (\S+)$", text, re.M):
            if f'model="{model}"' in labels:
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def engine_is_idle(self) -> bool:
        """Whether the engine's last snapshot shows no request and no page in use."""
        stats = httpx2.get(f"{self.url}/health/ready", timeout=30, verify=False).json()["stats"]
        return not (stats["num_running"] or stats["num_waiting"] or stats["num_pages_used"])


@contextmanager
def start(folder: Path, flags: Sequence[str] = ()) -> Iterator[Service]:
    """The bundled model with few places, so that the queue fills up. Its output is in the folder."""
    settings = ["--max-num-seqs", "16", "--max-queued-requests", "32"]
    settings += ["--served-model-name", f"{MODEL},{LEAVERS_MODEL}", *flags]
    with start_bundled(folder, *settings) as service:
        yield Service(service.url, service.process.pid)
        service.process.terminate()
        service.process.wait(40)


def _resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
