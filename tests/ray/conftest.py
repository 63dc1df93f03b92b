"""Ray Serve on this machine, with two replicas of the real service on the CPU."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.server.conftest import wait_until
from tests.server.service_process import ROOT, free_port, has_ended, health

BIN = ROOT / ".venv-ray" / "bin"


class Cluster:
    """Ray with the application of deploy/ray_serve.py; its HTTP is at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def services(self) -> list[int]:
        """Process ids of the services that the replicas run."""
        return _processes("-m", "server", "--client-header")

    @property
    def actors(self) -> list[int]:
        """Process ids of Ray's replicas."""
        return _processes("ray::ServeReplica")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Ready; it and all that it started are gone at the end."""
    if not (BIN / "serve").exists():
        pytest.fail(".venv-ray is missing: run `make ray`, which makes it")
    folder = tmp_path_factory.mktemp("ray")
    url = f"http://127.0.0.1:{free_port()}"
    with _application(folder, url):
        cluster = Cluster(url)
        with httpx2.Client(base_url=url, timeout=10, verify=False) as http:
            wait_until(lambda: health(http) == 200, 240)
        yield cluster
    wait_until(lambda: not cluster.services, 60)


@contextmanager
def _application(folder: Path, url: str) -> Iterator[None]:
    """`ray start` and `serve run`, as docs/deploy.md says."""
    environ = os.environ | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ADDRESS": "local",
    }
    options = [f"command={sys.executable} -m server", "flags=--num-threads 1 --max-num-seqs 16", "gpus=0", "cpus=0"]
    config = folder / "serve.yaml"
    arguments = dict(option.split("=", 1) for option in options) | {"replicas": 2}
    config.write_text(
        f"http_options: {{host: 127.0.0.1, port: {url.rpartition(':')[2]}}}\n"
        f"applications:\n- {{name: moe-serve, import_path: 'deploy.ray_serve:app', args: {arguments!r}}}\n"
    )
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["serve", "run", str(config)], env=environ, cwd=ROOT, stdout=log, stderr=log)
        try:
            yield
        except BaseException:
            print((folder / "log").read_text()[-5000:])
            raise
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(120)


def _processes(*words: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if all(word in line for word in words) and "setpriv" not in line and not has_ended(int(path.parent.name)):
            found.append(int(path.parent.name))
    return found
