"""The whole service with several ranks: on one host, on two loopback addresses as two hosts, and under torchrun."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx2
import pytest

from tests.server.conftest import wait_until
from tests.server.rank_faults import DP2, LONG, SCRIPTED_RANKS, TP2, Asking, start_ranks
from tests.server.service_process import ROOT, ServiceProcess, free_port, has_ended, model_folder

pytestmark = pytest.mark.ranks


TWO = ("--api-workers", "2")


def descendants(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children]


def test_ranks_of_one_host_serve_and_end_at_sigterm(tmp_path):
    with start_ranks(tmp_path, *DP2) as service, service.http() as http:
        pids = descendants(service.process.pid)
        assert len(pids) == 2
        answers = {http.post("/v1/completions", json={**LONG, "max_tokens": 20}).text.split('"text"')[1] for _ in "abc"}
        assert len(answers) == 1
        wait_until(lambda: stats_of(http).get("num_pages_used") == 0)
        service.signal(signal.SIGTERM)
        assert service.process.wait(20) == 0
        assert all(map(has_ended, pids))
        assert "Traceback" not in service.err


def test_two_http_processes_share_the_ranks(tmp_path):
    with start_ranks(tmp_path, *TP2, *TWO) as service, service.http() as http:
        asked = [Asking(service, {**LONG, "prompt": [i], "max_tokens": 30}) for i in range(8)]
        for each in asked:
            each.join(30)
        assert {each.status for each in asked} == {200}
        wait_until(lambda: stats_of(http).get("num_pages_used") == 0)
        service.signal(signal.SIGTERM)
        assert service.process.wait(20) == 0


def stats_of(http):
    """Counters of the engine; none before the first heartbeat."""
    return http.get("/health").json()["stats"] or {}


def start_hosts(stack, folder, layout, kind="fine", num_hosts=2, started=(1, 0), of_1=()):
    """Services that are hosts: at 127.0.0.2, where host 0 is, and at 127.0.0.1. Host 1 gets the flags `of_1` too."""
    hosts = ("--nnodes", str(num_hosts), "--master-addr", "127.0.0.2", "--master-port", str(free_port()))
    return [
        stack.enter_context(
            start_ranks(folder / str(rank), *layout, *hosts, *of_1 * rank, "--node-rank", str(rank), kind=kind)
        )
        for rank in started
    ][::-1]


@pytest.mark.parametrize("layout", [TP2, DP2, (*DP2, *TWO)], ids=["tp2", "dp2", "dp2-two-http-processes"])
def test_two_hosts_serve_and_end_together(tmp_path, layout):
    with ExitStack() as stack:
        service, far = start_hosts(stack, tmp_path, layout)
        with service.http() as http:
            asked = [Asking(service, {**LONG, "prompt": [i], "max_tokens": 30}) for i in range(8)]
            for each in asked:
                each.join(30)
            assert {each.status for each in asked} == {200}
            at_end = {"num_generated_tokens": 8 * 30, "num_pages_used": 0}
            wait_until(lambda: stats_of(http).items() >= at_end.items())
            assert http.post("/reset_prefix_cache").status_code == 200
        assert "host 1 of 2 runs ranks 1" in far.out
        far.signal(signal.SIGTERM)  # Kubernetes tells all hosts at once: this one waits for host 0
        time.sleep(0.5)
        assert far.process.poll() is None
        service.signal(signal.SIGTERM)
        assert service.process.wait(20) == 0
        assert far.process.wait(20) == 0
        assert "Traceback" not in service.err + far.err


@pytest.mark.parametrize("argv", [(), TWO], ids=["one", "two-http-processes"])
@pytest.mark.parametrize("victim", ["rank", "host", "host 0"])
def test_what_dies_on_one_host_ends_the_other(tmp_path, victim, argv):
    with ExitStack() as stack:
        service, far = start_hosts(stack, tmp_path, (*DP2, *argv))
        assert service.url
        pids = [*descendants(service.process.pid), *descendants(far.process.pid)]
        asked = [Asking(service, {**LONG, "prompt": [i]}) for i in range(4)]
        with service.http() as http:
            wait_until(lambda: stats_of(http).get("num_running") == 4)
        start_s = time.monotonic()
        dead = {"rank": pids[-1], "host": far.process.pid, "host 0": service.process.pid}[victim]
        os.kill(dead, signal.SIGKILL)
        for each in asked:
            each.join(30)
        assert time.monotonic() - start_s < 5
        if victim == "host 0":
            assert not {200, 503} & {each.status for each in asked}
        else:
            assert {each.status for each in asked} == {503}
            assert service.process.wait(20) == 1
        assert far.process.wait(20) == (-signal.SIGKILL if victim == "host" else 1)
        wait_until(lambda: all(map(has_ended, pids)), 20)
        assert ("killed by signal 9" in far.err) == (victim == "rank")


@pytest.mark.parametrize("kind", ["misset-1", "late-0"])
def test_a_wrong_setting_ends_both_hosts_with_2(tmp_path, kind):
    """Whichever host meets it, no supervisor need start the others again."""
    with ExitStack() as stack:
        service, far = start_hosts(stack, tmp_path, DP2, kind)
        assert (service.process.wait(60), far.process.wait(60)) == (2, 2)
        assert service.err.endswith("moe-serve: the engine cannot start: num_pages is 0: it must be at least 1\n")
        assert far.err.endswith("moe-serve: the engine cannot start: host 0 says why\n")


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        (("--page-size", "32"), "page_size is 32 on host 1 and 16 on host 0"),
        (("--tensor-parallel-size", "4"), "tensor_parallel_size is 4 on host 1 and 2 on host 0"),
    ],
)
def test_hosts_with_different_settings_end_with_2(tmp_path, flags, difference):
    with ExitStack() as stack:
        service, far = start_hosts(stack, tmp_path, TP2, of_1=flags)
        assert (service.process.wait(30), far.process.wait(30)) == (2, 2)
        assert f"the engine cannot start: {difference}: it must be the same on all hosts\n" in service.err
        assert difference in far.err
        assert "Traceback" not in service.err + far.err


def test_a_host_that_has_not_met_host_0_ends_at_sigterm(tmp_path):
    with ExitStack() as stack:
        (far,) = start_hosts(stack, tmp_path, TP2, started=(1,))
        wait_until(lambda: "meets the others" in far.err)
        far.signal(signal.SIGTERM)
        assert far.process.wait(5) == 0


def test_a_host_whose_host_0_dies_before_all_have_met_says_so_in_a_line(tmp_path):
    with ExitStack() as stack:
        port = free_port()  # of a service that is not ready, which has not told it
        layout = ("--tensor-parallel-size", "3", "--port", str(port))
        service, far = start_hosts(stack, tmp_path, layout, num_hosts=3)
        wait_until(lambda: missing_at(port) == "host 2 (rank 2)", 20)
        service.process.kill()
        assert far.process.wait(20) == 1
        assert re.fullmatch(r"(.* INFO .*\n)+.* ERROR .*: host 0 at 127.0.0.2, port \d+ has ended.*\n", far.err), (
            far.err
        )


def missing_at(port):
    """The hosts that the service waits for; None if it does not say, or does not listen yet."""
    with suppress(httpx2.TransportError):
        return httpx2.get(f"http://127.0.0.1:{port}/health").json()["waits_for"]


def test_torchrun_starts_the_ranks(tmp_path):
    model, port = model_folder(tmp_path, "fine"), free_port()
    script = tmp_path / "serve.py"
    script.write_text(SCRIPTED_RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    flags = ["--port", str(port), "--model", str(model), "--device", "cpu", *TP2]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (
        open(tmp_path / "out", "w") as out,
        open(tmp_path / "err", "w") as err,
        subprocess.Popen([*command, *flags], cwd=ROOT, stdout=out, stderr=err, env=env) as process,
    ):
        try:
            service = ServiceProcess(process, tmp_path)
            with service.http() as http:
                assert http.post("/v1/completions", json={**LONG, "max_tokens": 9}).status_code == 200
            process.send_signal(signal.SIGTERM)
            process.wait(40)
        finally:
            process.kill()
        wait_until(lambda: not descendants_named(str(model)), 20)


def descendants_named(text):
    """Processes whose command line has this text."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            found += [folder.name] if text in line else []
    return found
