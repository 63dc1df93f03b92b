"""SIGUSR1 in a process of its own: stacks and state on standard error, whatever its threads do."""

import os
import signal
import subprocess
import sys

from engine.stack_dump import handles_signal
from tests.engine.fakes import fake_core
from tests.engine.requests import request
from tests.tables import rows

PROGRAM = """
import sys, threading, time
from engine.stack_dump import dump_on_signal
def wait_in_a_thread():
    threading.Event().wait()
threading.Thread(target=wait_in_a_thread, daemon=True).start()
dump_on_signal(lambda: {describe})
print("ready", flush=True)
{main}
"""

HANG_IN_C = """
import ctypes
while True:
    ctypes.CDLL(None).pause()  # as a call of CUDA may; it returns at a signal
"""


@rows(
    "main, describe, state",
    ("sys.stdin.read()", "'3 requests run'", b": 3 requests run\n"),
    ("while True: pass", "'3 requests run'", b": 3 requests run\n"),
    (HANG_IN_C, "'3 requests run'", b": 3 requests run\n"),
    ("sys.stdin.read()", "[][0]", b": the state cannot be described now: IndexError('list index out of range')\n"),
)
def test_a_process_writes_stacks_and_state_and_goes_on(main, describe, state):
    code = PROGRAM.format(main=main, describe=describe)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            assert handles_signal(process.pid)
            process.send_signal(signal.SIGUSR1)
            written = b""
            while state not in written:
                more = os.read(process.stderr.fileno(), 65536)
                assert more, written
                written += more
            assert b"process %d" % process.pid in written
            assert b"in wait_in_a_thread" in written
            assert b"Current thread" in written
            assert process.poll() is None
        finally:
            process.kill()


def test_a_process_without_a_handler_is_spared():
    """One that starts would die of the signal."""
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not handles_signal(process.pid)
        process.kill()
    assert not handles_signal(process.pid)


def test_the_scheduler_describes_its_requests():
    core = fake_core(overlap=False, max_num_seqs=1)
    core.add(request("first", range(1, 7), max_tokens=5))
    core.add(request("second", [1], max_tokens=5))
    core.step()
    first, *others = core.describe().splitlines()
    assert first.startswith("1 steps begun; 1 requests run and 1 wait, 2 of 64 pages are in use, 0 preemptions")
    assert others == [
        "  first runs in row 0: 6 prompt tokens, 1 of 5 generated, 6 computed, 2 pages, 0 steps in flight",
        "  second waits: 1 prompt tokens, 0 of 5 generated, 0 computed, 0 pages, 0 steps in flight",
    ]


@rows("status", "", "SigCgt:\t0000000000000000\n")
def test_a_status_without_the_signal(tmp_path, status):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text(status)
    assert not handles_signal(7, tmp_path)
