"""Ray Serve on this machine, with two replicas of the real service on the CPU."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.server.conftest import wait_until
from tests.server.service_process import ROOT, free_port, has_ended

BIN = ROOT / ".venv-ray" / "bin"


class Cluster:
    """Ray with the application of deploy/ray_serve.py; its HTTP is at `url`. No other has a model of this `name`."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name

    @property
    def services(self) -> list[int]:
        """Process ids of the services that the replicas run."""
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if self._is_service(path)]

    @property
    def actors(self) -> list[int]:
        """Process ids of Ray's replicas, the services' parents."""
        return [int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in self.services]

    def _is_service(self, cmdline: Path) -> bool:
        try:
            words = cmdline.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            return False
        return words[1:3] == ["-m", "server"] and self.name in words and not has_ended(int(cmdline.parent.name))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Ready; it and all that it started are gone at the end."""
    if not (BIN / "python").exists():
        pytest.fail(".venv-ray is missing: run `make ray`, which makes it")
    folder = tmp_path_factory.mktemp("ray")
    cluster = Cluster(f"http://127.0.0.1:{free_port()}", f"ray-{os.getpid()}")
    with _application(folder, cluster) as process:

        def is_ready() -> bool:
            """With both replicas: sessions would move when the second joins."""
            assert process.poll() is None, "Ray Serve has ended"
            return "Application 'moe-serve' is ready" in (folder / "log").read_text()

        wait_until(is_ready, 300)
        yield cluster
    wait_until(lambda: not cluster.services, 60)


@contextmanager
def _application(folder: Path, cluster: Cluster) -> Iterator[subprocess.Popen]:
    """The driver's process; it ends Ray when it ends."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    flags = f"--num-threads 1 --max-num-seqs 16 --served-model-name {cluster.name}"
    options = [f"command={sys.executable} -m server", f"flags={flags}", "gpus=0", "cpus=0", "replicas=2"]
    command = [BIN / "python", "-m", "tests.ray.driver", cluster.url.rpartition(":")[2], *options]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environ, cwd=ROOT, stdout=log, stderr=log)
        try:
            yield process
        except BaseException:
            print((folder / "log").read_text()[-5000:])
            raise
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(120)
