"""How the service starts: signals that come early (G07), and standard streams or folders it cannot write to (G08)."""

import asyncio
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import httpx2
import pytest

from server.service import _announce
from tests.server.conftest import ASSETS, NUM_API_WORKERS, wait_until
from tests.server.service_process import PLAIN, ROOT, SCRIPTED, free_port, has_ended, health, start
from tests.tables import rows

LAST_IMPORT = "fastapi" if NUM_API_WORKERS == 1 else "server.supervisor"
ASK = {"prompt": [5], "max_tokens": 3, "ignore_eos": True}


SIGNAL_AT_IMPORT = """
import os, sys

def send_signal(event, args):
    if event == "import" and args[0] == {module!r}:
        with open(f"/proc/self/task/{{os.getpid()}}/children") as children:
            sys.stderr.write(f"children: {{children.read()}}\\n")
        os.kill(os.getpid(), {sig})

sys.addaudithook(send_signal)
"""
FIRST_IMPORT = "server.open_files"  # of ours, after the entry point itself
INSIDE_C_CODE = "uvloop._noop"  # uvloop.loop imports it while its own C code initialises it


@pytest.mark.timeout(300)  # a service for each row
@rows(
    "module, sig, status",
    *(
        [(module, signal.SIGTERM, 0) for module in (FIRST_IMPORT, "argparse", "uvloop", INSIDE_C_CODE, LAST_IMPORT)]
        + [(module, signal.SIGINT, 130) for module in (FIRST_IMPORT, INSIDE_C_CODE)]
        + [(module, signal.SIGHUP, 0) for module in (FIRST_IMPORT, INSIDE_C_CODE)]
    ),
)
def test_a_signal_during_the_imports_ends_the_service_g07(tmp_path, module, sig, status):
    """As process 1 it used to go on: the system drops signals that it does not handle. With the last import, the
    engine's process runs already.
    """
    with start(tmp_path, "slow", code=SIGNAL_AT_IMPORT.format(module=module, sig=int(sig)) + PLAIN) as service:
        assert service.process.wait(30) == status
        [line] = service.err.splitlines()
        children = [int(pid) for pid in line.removeprefix("children:").split()]
        assert len(children) == (1 if module == LAST_IMPORT else 0)
        wait_until(lambda: all(has_ended(pid) for pid in children))
    assert service.out == ""


CHECK_HANDLERS = """
import signal, sys

def check_handlers(event, args):
    if event == "import" and (has_begun or args[0].startswith("server.") and args[0] != "server.start"):
        has_begun.append(args[0])
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if not getattr(signal.getsignal(sig), "__module__", "").startswith("server."):
                sys.stderr.write(f"{args[0]} is imported while nobody handles {sig.name}\\n")

has_begun = []
sys.addaudithook(check_handlers)
"""


def test_our_handlers_are_in_place_at_every_import_g07(tmp_path):
    """From the first import of ours until the service listens; a library might set handlers of its own."""
    port = free_port()
    argv = ("--port", str(port), "--model", str(ASSETS))
    with start(tmp_path, "slow", *argv, code=CHECK_HANDLERS + PLAIN) as service:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, verify=False) as http:
            wait_until(lambda: health(http) is not None, 30)
        service.signal(signal.SIGTERM)
        assert service.process.wait(30) == 0
    assert "nobody handles" not in service.err


READ_ONLY = """
import os, sys

def refuse_to_write(event, args):
    if event == "os.mkdir" or (event == "open" and args[2] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)):
        raise OSError(30, "Read-only file system", args[0])

sys.addaudithook(refuse_to_write)
"""


def closing(*descriptors):
    def close():
        for descriptor in descriptors:
            os.close(descriptor)

    return close


def full_disk():
    return open("/dev/full", "w")


STREAMS = {
    "output closed": {"preexec_fn": closing(1)},
    "all closed": {"preexec_fn": closing(0, 1, 2)},
    "output on a full disk": {"stdout": "/dev/full"},
    "both on a full disk": {"stdout": "/dev/full", "stderr": "/dev/full"},
}


@pytest.mark.processes
@pytest.mark.timeout(300)  # a service for each row
@rows("kind", *STREAMS)
def test_standard_streams_that_cannot_be_written_do_not_matter_g08(tmp_path, kind):
    """Such streams used to end the service with a traceback, or turned its exit status into 1."""
    port = free_port()
    with start(tmp_path, "fake", "--port", str(port), **STREAMS[kind]) as service:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, verify=False) as http:
            wait_until(lambda: health(http) == 200, 30)
            assert http.post("/v1/completions", json=ASK).json()["usage"]["completion_tokens"] == 3
        if kind == "output on a full disk":
            wait_until(lambda: "cannot be written" in service.err, 30)  # once all HTTP processes serve
        service.signal(signal.SIGTERM)
        assert service.process.wait(30) == 0
    assert "Traceback" not in service.err
    assert ("standard output cannot be written: No space left on device" in service.err) == (
        kind == "output on a full disk"
    )


def test_a_server_that_stops_before_all_of_it_serves_is_not_announced(capsys):
    """The last of its HTTP processes may begin to serve while the others end."""
    engine = SimpleNamespace(ready=True, failure=None, info=object())
    server = SimpleNamespace(started=False, should_exit=False)

    async def stop_while_announcing():
        announcing = asyncio.create_task(_announce(engine, server, None, None, "http://127.0.0.1:1", 0.0))
        await asyncio.sleep(0)
        server.should_exit = server.started = True
        await announcing

    asyncio.run(stop_while_announcing())
    assert capsys.readouterr().out == ""


def test_no_writable_folder_is_needed_g08(tmp_path):
    """Neither a read-only root nor a long TMPDIR matters: the sockets between the processes have abstract names."""
    environ = os.environ | {"TMPDIR": str(tmp_path / ("a" * 120))}
    with start(tmp_path, "fake", code=READ_ONLY + SCRIPTED, env=environ) as service:
        with service.http() as http:
            assert http.post("/v1/completions", json=ASK).json()["usage"]["completion_tokens"] == 3
        service.signal(signal.SIGTERM)
        assert service.process.wait(30) == 0


def test_a_signal_while_the_model_loads_ends_the_service_with_0_g07(tmp_path):
    port = free_port()
    with start(tmp_path, "loading", "--port", str(port)) as service:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, verify=False) as http:
            wait_until(lambda: health(http) == 503, 30)
        service.signal(signal.SIGTERM)
        assert service.process.wait(30) == 0
    assert service.out == ""


@rows(
    "argv, options, status, words",
    (["--help"], {"stdout": "/dev/full"}, 1, "cannot write to standard output: No space left on device"),
    (["--version"], {"stdout": "/dev/full"}, 1, "cannot write to standard output"),
    (["explain", "--help"], {"stdout": "/dev/full"}, 1, "cannot write to standard output"),
    (["--port", "x"], {"stderr": "/dev/full"}, 2, ""),
)
def test_commands_whose_output_cannot_be_written_say_so_g08(argv, options, status, words):
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with open("/dev/full", "w") as full:
        options = dict.fromkeys(options, full)
        done = subprocess.run([sys.executable, "-m", "server", *argv], cwd=ROOT, check=False, **streams | options)
    assert done.returncode == status
    assert words in (done.stderr or "")
    assert (done.stderr or "").count("\n") <= 1
