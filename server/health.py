"""`moe-serve health`: asks a running service whether it is alive. For a container's health check."""

import http.client
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from server import streams
from server.own_service import OwnService
from server.settings import Parser, Setting, given_values

_TIMEOUT_S = 3.0
_PROC = Path("/proc")


def make_parser(program: str) -> Parser:
    """The flags of `moe-serve health` itself."""
    parser = Parser(
        prog=f"{program} health",
        usage="%(prog)s [--of-pid PID] [flags of the service]",
        description="Ask the service that was started with these flags and MOE_SERVE_* variables whether it is alive.",
        allow_abbrev=False,
    )
    parser.add_argument("--of-pid", type=int, metavar="PID", help="take the flags of this process: 1 in a container")
    return parser


def health(
    argv: Sequence[str], program: str, settings: Mapping[str, Setting], environ: Mapping[str, str], proc: Path = _PROC
) -> int:
    """Print the answer of /health/live; returns 0 if the service is alive, else 1.

    Raises:
        SettingError: a wrong flag or variable, or port 0, which does not say where the service listens.
    """
    parser = make_parser(program)
    own, flags = parser.parse_known_args(argv)
    its_flags = [] if own.of_pid is None else _flags_of(proc / str(own.of_pid), program)
    status, text = _ask(OwnService.of(given_values(settings, parser, [*(its_flags or []), *flags], environ)))
    if not status and its_flags is None:
        text += (
            f" (--of-pid: process {own.of_pid} is not {program}, so this address comes from other flags and variables)"
        )
    streams.write(sys.stdout, f"{text}\n")  # the exit status is the answer, even if the text cannot be written
    return 0 if status == http.client.OK else 1


def _flags_of(folder: Path, program: str) -> list[str] | None:
    """The flags in a process's command line; None if it runs another program or is gone."""
    try:
        words = (folder / "cmdline").read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
    except OSError:
        return None
    names = [PurePath(word).name for word in words]
    for place, name in enumerate(names):
        if name == program or names[max(0, place - 1) : place + 1] == ["-m", "server"]:
            return _from_its_folder(words[place + 1 :], folder / "cwd")
    return None


def _from_its_folder(flags: list[str], cwd: Path) -> list[str]:
    """The flags with the path of the --config file that a process means that runs in `cwd`."""

    def find(file: str) -> str:
        return str(cwd / file) if (cwd / file).is_file() else file

    words = []
    for before, flag in zip(["", *flags], flags, strict=False):
        name, has_value, file = flag.partition("=")
        if before == "--config":
            words.append(find(flag))
        else:
            words.append(f"--config={find(file)}" if name == "--config" and has_value else flag)
    return words


def _ask(service: OwnService) -> tuple[int, str]:
    """Status and body, or 0 and why there is no answer."""
    try:
        status, body = service.get("/health/live", timeout_s=_TIMEOUT_S)
    except (OSError, http.client.HTTPException) as error:
        return 0, service.no_answer(error)
    return status, body.decode(errors="replace")
