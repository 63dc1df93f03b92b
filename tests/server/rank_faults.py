"""Breaks one process of a service of several ranks while it answers, and notes what clients and the machine see.

    python -m tests.server.rank_faults [--layouts tp2,dp2,tp2-dp2] [--out FOLDER]

The ranks run a scripted model whose steps meet in a collective. Seconds count from the fault: until the last client has
its answer or its connection ends, and until no process is left. `left` lists shared memory, sockets and temporary files
that outlive the service. The last lines are the table of docs/ranks.md and JSON. Exit status 1: a row is wrong.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx2

from benchmarks import record
from tests.engine.fake_rank_worker import POISON
from tests.server.conftest import wait_until
from tests.server.service_process import has_ended, start

SCRIPTED_RANKS = """
import sys
import engine.rank_processes
engine.rank_processes.RANK_MODULE = "tests.engine.fake_rank_worker"
from server.start import main
sys.exit(main())
"""
TP2 = ("--tensor-parallel-size", "2")
DP2 = ("--data-parallel-size", "2", "--expert-parallel-size", "2")
LAYOUTS = {"tp2": TP2, "dp2": DP2, "tp2-dp2": (*TP2, "--data-parallel-size", "2", "--expert-parallel-size", "4")}
NUM_POISONS = 6
LONG = {"prompt": [5, 6, 7], "max_tokens": 300, "temperature": 0, "ignore_eos": True}
TOLD_WITHIN_S = 5.0
STEP_TIMEOUT_S = 2.0
PAUSE_S = 6.0  # longer than a rank may be without a heartbeat
INSIDE = ("raise", "hang", "missing")  # faults that the ranks' model commits; the others are signals
WORDS = {
    "kill": "`kill -9`", "stop": "SIGSTOP", "pause": f"SIGSTOP, SIGCONT after {PAUSE_S:.0f} s", "raise": "exception",
    "hang": f"hung step (`--step-timeout {STEP_TIMEOUT_S:.0f}`)", "missing": "cannot start",
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """`victim`: "rank N", "service" (supervisor of the ranks and HTTP process in one), and with two HTTP processes
    "supervisor" or "HTTP process".
    """

    layout: str
    victim: str
    how: str

    @property
    def rank(self):
        """Number of the rank, None for another process."""
        return int(self.victim.split()[1]) if self.victim.startswith("rank") else None

    @property
    def outcome(self):
        """What has to follow: "told", "refused", "cut off" or "served"."""
        if self.how == "missing":
            return "refused"
        if self.rank is not None:
            return "told"
        return "served" if self.how == "pause" or self.victim == "HTTP process" else "cut off"


@dataclass
class Seen:
    """What followed. `statuses`: of the answers to those who asked before; "cut off" if the connection ended."""

    statuses: list
    told_s: float | None
    ended_s: float | None
    exit_status: int | None
    orphans: int
    left: list
    reason: str
    times_told: int


def faults(layouts=LAYOUTS):
    """All rows of the table."""
    found = []
    for layout in layouts:
        ranks = (0, 1, 3) if layout == "tp2-dp2" else (0, 1)
        hows = ("kill", "stop", "raise", "hang", "missing")
        found += [Fault(layout, f"rank {rank}", how) for how in hows for rank in ranks]
        found += [Fault(layout, "service", how) for how in ("kill", "pause")]
        if layout != "tp2-dp2":
            victims = ("supervisor", "HTTP process")
            found += [Fault(layout, victim, how) for victim in victims for how in ("kill", "pause")]
    return found


def start_ranks(folder, *argv, kind="fine", **popen):
    """The service around scripted ranks; `kind` is the model's name, which says what goes wrong."""
    folder.mkdir(exist_ok=True)
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo"} | popen.pop("env", {})
    return start(folder, kind, "--device", "cpu", *argv, code=SCRIPTED_RANKS, env=env, **popen)


class Asking(threading.Thread):
    """A request in the background; its status, or the error that ended its connection."""

    def __init__(self, service, fields):
        super().__init__()
        self._service, self._fields = service, fields
        self.status, self.end_s = None, None
        self.start()

    def run(self):
        with self._service.http() as http:
            try:
                self.status = http.post("/v1/completions", json=self._fields).status_code
            except httpx2.TransportError as error:
                self.status = error
        self.end_s = time.monotonic()


def see(fault, folder):
    """Start the service, commit the fault, and watch."""
    kind = f"{fault.how}-{fault.rank}" if fault.how in INSIDE else "paced-0"
    argv = [*LAYOUTS[fault.layout], "--step-timeout", str(STEP_TIMEOUT_S if fault.how == "hang" else 60)]
    if fault.victim in ("supervisor", "HTTP process"):
        argv += ["--api-workers", "2"]
    with (
        tempfile.TemporaryDirectory() as scratch,
        start_ranks(folder, *argv, kind=kind, env={"TMPDIR": scratch}) as service,
    ):
        status = told_s = None
        if fault.how == "missing":
            start_s, statuses, pids, files = time.monotonic(), [], [], set()
            status = service.process.wait(60)
        else:
            asked, start_s, pids, files = _break(fault, service)
            for each in asked:
                each.join(60)
            told_s = round(max(each.end_s for each in asked) - start_s, 2)
            statuses = sorted({each.status if isinstance(each.status, int) else "cut off" for each in asked}, key=str)
            if fault.outcome == "served":
                with service.http() as http:
                    assert http.post("/v1/completions", json={**LONG, "max_tokens": 3}).status_code == 200
                    pids, files = everybody(service), files | files_of(everybody(service))
                start_s = time.monotonic()
                service.signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                status = service.process.wait(60)
        with suppress(AssertionError):
            wait_until(lambda: all(map(has_ended, pids)), 20)
        ended_s = round(time.monotonic() - start_s, 2)
        orphans = sum(not has_ended(pid) for pid in pids)
        left = sorted(str(path) for path in {*files, *Path(scratch).iterdir()} if path.exists())
        reason = next((line for line in service.err.splitlines()[::-1] if _is_reason(line)), "")
        times = service.err.count("model is missing") if fault.how == "missing" else 0
    return Seen(statuses, told_s, ended_s, status, orphans, left, reason, times)


def _break(fault, service):
    """Commit the fault while four requests run: (who asked, when it came, all processes, their files)."""
    with service.http() as http:
        asked = [Asking(service, {**LONG, "prompt": [i + 1, 6]}) for i in range(4)]
        wait_until(lambda: _num_running(http) == 4)
    pids = everybody(service)
    files = files_of(pids)
    start_s = time.monotonic()
    if fault.how in INSIDE:  # requests go where the fewest tokens are, so these come to every scheduler
        asked += [Asking(service, {**LONG, "prompt": [i + 10] * 150 + [POISON]}) for i in range(NUM_POISONS)]
        return asked, start_s, pids, files
    victim = service.process.pid
    if fault.rank is not None:
        victim = ranks_of(service)[fault.rank]
    elif fault.victim == "HTTP process":
        victim = service.api_pids[0]
    os.kill(victim, signal.SIGKILL if fault.how == "kill" else signal.SIGSTOP)
    if fault.how == "pause":
        time.sleep(PAUSE_S)
        os.kill(victim, signal.SIGCONT)
    return asked, start_s, pids, files


def _num_running(http):
    stats = http.get("/health").json()["stats"]  # None before the first heartbeat
    return stats["num_running"] if stats else 0


def ranks_of(service):
    """Process ids by rank: they are started in order."""
    return sorted(pid for pid in service.children if b"rank_worker" in Path(f"/proc/{pid}/cmdline").read_bytes())


def everybody(service):
    """Process ids of the service and all that it started."""
    found = [service.process.pid]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def files_of(pids):
    """Shared memory that these processes map, and sockets in the file system that they have bound."""
    found, inodes = set(), set()
    for pid in pids:
        found |= {Path(line.split(maxsplit=5)[5]) for line in _lines(f"/proc/{pid}/maps") if " /dev/shm/" in line}
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                inodes.add(os.readlink(each))
    for line in _lines("/proc/net/unix")[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[7].startswith("/") and f"socket:[{fields[6]}]" in inodes:
            found.add(Path(fields[7]))
    return found


def _lines(file):
    return Path(file).read_text().splitlines()


def _is_reason(line):
    return any(words in line for words in ("rank", "model is missing", "step_timeout"))


def complaints(fault, seen):
    """What is not as it has to be."""
    statuses = {"told": ([503],), "refused": ([],), "cut off": (["cut off"],), "served": ([200],)}[fault.outcome]
    if (fault.victim, fault.how) == ("HTTP process", "kill"):
        statuses = ([200], [200, "cut off"], ["cut off"])  # as many of the four as it had
    limit_s = TOLD_WITHIN_S + (STEP_TIMEOUT_S if fault.how == "hang" else 0)
    status = {"told": 1, "refused": 1, "cut off": -signal.SIGKILL, "served": 0}[fault.outcome]
    found = []
    if seen.statuses not in statuses:
        found.append(f"clients got {seen.statuses}")
    if fault.outcome in ("told", "cut off") and seen.told_s >= limit_s:
        found.append(f"clients were told after {seen.told_s} s")
    if seen.exit_status != status:
        found.append(f"exit status {seen.exit_status}")
    if seen.orphans or seen.left:
        found.append(f"{seen.orphans} processes and {seen.left} outlived the service")
    if fault.outcome == "refused" and seen.times_told != 1:
        found.append(f"the reason was told {seen.times_told} times")
    return found


def table(rows):
    """Markdown."""
    lines = [
        "| layout | victim | fault | clients | told after, s | all ended after, s | exit status | left |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for fault, seen in rows:
        clients = " or ".join(map(str, seen.statuses)) or "refused at start"
        told = "" if seen.told_s is None or fault.outcome == "served" else seen.told_s
        ended = "" if fault.outcome == "served" else seen.ended_s
        left = f"{seen.orphans} processes, {len(seen.left)} files" if seen.orphans or seen.left else "nothing"
        lines.append(
            f"| {fault.layout} | {fault.victim} | {WORDS[fault.how]} | {clients} | {told} | {ended} | "
            f"{seen.exit_status} | {left} |"
        )
    return "\n".join(lines)


def main(argv=None):
    """Exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", type=lambda text: text.split(","), default=list(LAYOUTS))
    parser.add_argument("--out", type=Path, help="folder for rank_faults_cpu.json")
    args = parser.parse_args(argv)
    rows, wrong = [], 0
    for index, fault in enumerate(faults(args.layouts)):
        with tempfile.TemporaryDirectory() as folder:
            seen = see(fault, Path(folder) / str(index))
        found = complaints(fault, seen)
        wrong += bool(found)
        rows.append((fault, seen))
        print(fault, seen, found or "as expected", flush=True)
    content = [asdict(fault) | asdict(seen) for fault, seen in rows]
    if args.out is not None:
        record.write("rank_faults_cpu", {**record.environment(), "rows": content}, args.out)
    print(table(rows))
    print(json.dumps(content))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
