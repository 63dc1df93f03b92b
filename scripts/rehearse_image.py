"""Tries a stage of the Dockerfile without Docker: runs its RUN steps in a folder with a Linux system, then the service.

Usage, as root: mmdebstrap --variant=minbase bookworm FOLDER && python scripts/rehearse_image.py FOLDER cpu
Every RUN step runs in the folder with the image's ENV, ARG, WORKDIR and --mount; this needs bubblewrap. Then the
ENTRYPOINT runs as process 1 of a namespace with a read-only file system, once as the USER and once as a uid without a
name: it must become ready, answer HEALTHCHECK on another port, and end on SIGTERM. `--skip TEXT` leaves out steps that
contain the text; `--bind FOLDER` shows a folder of the host inside; `--env NAME=VALUE` sets a variable for RUN steps.
"""

import argparse
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UIDS = ("image", "54321")
_DEADLINE_S = 120


@dataclass(kw_only=True, slots=True)
class Stage:
    """One stage: its RUN steps with the environment and folder of each, and what the running image has."""

    steps: list[tuple[str, dict[str, str], str]] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    arguments: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0"
    entrypoint: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)

    def add(self, instruction: str, text: str) -> None:
        """Take one instruction; ignores those that have no effect here."""
        if instruction == "RUN":
            self.steps.append((text, {**self.arguments, **self.environ}, self.folder))
        elif instruction in ("ENV", "ARG", "LABEL"):
            table = {"ENV": self.environ, "ARG": self.arguments, "LABEL": self.labels}[instruction]
            for word in shlex.split(text):
                name, _, value = word.partition("=")
                table[name] = re.sub(r"\$(\w+)", lambda match: self.environ.get(match[1], ""), value)
        elif instruction == "WORKDIR":
            self.folder = text
        elif instruction == "USER":
            self.user = text
        elif instruction == "ENTRYPOINT":
            self.entrypoint = json.loads(text)
        elif instruction == "HEALTHCHECK":
            self.healthcheck = json.loads(text.partition("CMD ")[2])


def read_stages(file: Path) -> dict[str, Stage]:
    """Stages of a Dockerfile by name."""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    stages: dict[str, Stage] = {}
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, _, text = line.strip().partition(" ")
        if instruction == "FROM":
            stage = stages[text.split()[-1]] = Stage()
        elif instruction:
            stage.add(instruction, text.strip())
    return stages


def run_step(root: Path, text: str, environ: dict[str, str], folder: str, binds: list[str]) -> None:
    """One RUN step in the folder, with the host's network."""
    mounts = []
    while text.startswith("--mount="):
        mount, _, text = text.partition(" ")
        parts = dict(part.partition("=")[::2] for part in mount.removeprefix("--mount=").split(","))
        mounts += ["--bind" if "rw" in parts else "--ro-bind", str(copy_of(parts.get("source", "."))), parts["target"]]
    shown = [word for bind in binds for word in ("--ro-bind", bind, bind)]
    files = ["--bind", str(root), "/", "--dev", "/dev", "--proc", "/proc", "--ro-bind", *["/etc/resolv.conf"] * 2]
    command = ["bwrap", *files, *shown, *mounts, "--chdir", folder, "/bin/sh", "-c", text.strip()]
    subprocess.run(command, env=environ, check=True)


def copy_of(source: str) -> Path:
    """A copy of the committed files, which the build sees as the project; a step may write there."""
    if source != ".":
        return ROOT / source
    copy = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    files = subprocess.Popen(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", copy], stdin=files.stdout, check=True)
    return copy


def enter(root: Path, stage: Stage, uid: str, command: list[str]) -> list[str]:
    """The command line that runs a command inside as process 1 of a namespace where only /cache is writable."""
    user = user_of(stage, uid)
    inside = ["chroot", f"--userspec={user}:{user}", str(root), "env", "-C", stage.folder, *command]
    mounts = (
        f"mount --bind {root} {root}",
        f"mount -t proc proc {root}/proc",
        f"mount --rbind /dev {root}/dev",
        f"mount --bind {root}/cache {root}/cache",
        f"mount -o remount,ro,bind {root}",
    )
    setup = " && ".join([*mounts, f"exec {shlex.join(inside)}"])
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", setup]


def user_of(stage: Stage, uid: str) -> str:
    """The image's own user, or the uid itself."""
    return stage.user if uid == "image" else uid


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def serve(root: Path, stage: Stage, uid: str) -> None:
    """Start, wait until ready, ask the health check, stop. Raises SystemExit at the first fault."""
    port = free_port()
    command = enter(root, stage, uid, [*stage.entrypoint, "--port", str(port)])
    service = subprocess.Popen(command, env=stage.environ)
    deadline_s = time.monotonic() + _DEADLINE_S
    ask = [sys.executable, "-c", f"import urllib.request as r; r.urlopen('http://127.0.0.1:{port}/health/ready')"]
    while subprocess.run(ask, stderr=subprocess.DEVNULL, check=False).returncode:
        if service.poll() is not None or time.monotonic() > deadline_s:
            service.kill()
            raise SystemExit(f"uid {uid}: the service does not become ready")
        time.sleep(0.5)
    first = next(int(word) for word in Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text().split())
    user = user_of(stage, uid)
    check = ["nsenter", "--target", str(first), "--mount", "--pid", "--root", "--setuid", user, "--setgid", user,
             *stage.healthcheck]  # fmt: skip
    healthy = subprocess.run(check, env=stage.environ, check=False).returncode == 0
    os.kill(first, signal.SIGTERM)
    status = service.wait(timeout=_DEADLINE_S)
    if not healthy or status:
        raise SystemExit(f"uid {uid}: health check {'passed' if healthy else 'failed'}, exit status {status}")
    sys.stdout.write(f"uid {uid}: ready, healthy on port {port}, ended with status 0 on SIGTERM\n")


def main() -> None:
    """Rehearse one stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("stage")
    parser.add_argument("--skip", action="append", default=[])
    parser.add_argument("--bind", action="append", default=[])
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE, for the RUN steps")
    flags = parser.parse_args()
    stage = read_stages(ROOT / "Dockerfile")[flags.stage]
    given = dict(text.partition("=")[::2] for text in flags.env)
    for text, environ, folder in stage.steps:
        is_left_out = any(part in text for part in flags.skip)
        sys.stdout.write(f"{'left out' if is_left_out else 'RUN'} {text}\n")
        sys.stdout.flush()
        if not is_left_out:
            run_step(flags.root, text, {**environ, **given}, folder, flags.bind)
    for uid in UIDS:
        serve(flags.root, stage, uid)


if __name__ == "__main__":
    main()
