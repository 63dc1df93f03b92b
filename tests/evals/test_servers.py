"""How a server ends, and the program that asks it: start errors by exit status, and signals. Servers are stand-ins."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evals.client import ServerError
from evals.servers import StartRefused, serving
from tests.server.conftest import wait_until
from tests.tables import rows

ROOT = Path(__file__).parents[2]
NEVER_READY = "import os, time; print(os.getpid(), file=open('pid', 'w')); time.sleep(60)"


@rows(
    "code, kind, words",
    ("print('model is wrong'); raise SystemExit(2)", StartRefused, "^model is wrong$"),
    ("print('no room'); raise SystemExit(1)", ServerError, "ended with status 1: no room; its log is "),
    ("import os; os.kill(os.getpid(), 9)", ServerError, "ended with status -9: it said nothing; its log is "),
    ("print('loading', flush=True); import time; time.sleep(60)", ServerError, "not ready after 1 s: loading; its log"),
)
def test_only_status_2_is_a_refusal(code: str, kind: type, words: str, tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match=words) as caught,
        serving([sys.executable, "-c", code], tmp_path / "log", start_timeout_s=1.0),
    ):
        pass
    assert type(caught.value) is kind


@rows("number, status", (signal.SIGTERM, 143), (signal.SIGINT, 130))
def test_a_signal_ends_the_matrix_and_its_server(number: int, status: int, tmp_path: Path) -> None:
    """The server was left behind."""
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "__init__.py").touch()
    (tmp_path / "server" / "__main__.py").write_text(NEVER_READY)
    command = [sys.executable, "-m", "evals", "matrix", "--items", "1", "--questions", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as program:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
        program.send_signal(number)
        assert program.wait(20) == status
        assert program.stderr is not None
        assert program.stderr.read() == f"evals: stopped by {signal.Signals(number).name}\n"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_ctrl_c_does_not_wait_for_a_server_that_hangs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        command = [sys.executable, "-m", "evals", "tiny", "--model", "m", "--items", "2", "--base-url", base_url]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as asker:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1)
                start_s = time.monotonic()
                asker.send_signal(signal.SIGINT)
                assert asker.wait(20) == 130
                assert time.monotonic() - start_s < 5
            assert asker.stderr is not None
            assert asker.stderr.read() == "evals: stopped by SIGINT\n"
