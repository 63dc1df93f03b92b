"""Resolves the project with all extras for every supported Python, from the public index only; installs nothing.

Fails if the pins contradict each other, if a wheel is missing, if a resolved package has no pin in constraints.txt, or
if nothing asks for a pinned package. Run it with `make pins`.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
# Variables that would add other package indexes.
LOCAL_SOURCES = ("UV_FIND_LINKS", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_CONSTRAINT", "UV_OVERRIDE")


def pins(lines: Iterable[str]) -> dict[str, str]:
    """Version by normalized name of every line `name==version`."""
    found = {}
    for line in lines:
        name, equals, version = line.partition("==")
        if equals and not name.startswith("#"):
            found[re.sub(r"[-_.]+", "-", name).lower()] = version.strip()
    return found


def resolve(python: str) -> dict[str, str]:
    """The packages for one Python version. Raises SystemExit with the resolver's reason if nothing fits."""
    environ = {name: value for name, value in os.environ.items() if name not in LOCAL_SOURCES}
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--all-extras", "-c", "constraints.txt",
               "--python-version", python, "--no-config", "--only-binary", ":all:", "--no-header", "--no-annotate",
               "--quiet"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"constraints.txt does not fit Python {python}:\n{done.stderr}")
    return pins(done.stdout.splitlines())


def faults(pinned: dict[str, str], resolved: dict[str, str]) -> list[str]:
    """What is wrong with the pins, a line each: packages without one, and pins of packages that nothing asks for."""
    return [f"pin it: {name}=={resolved[name]}" for name in sorted(resolved.keys() - pinned.keys())] + [
        f"nothing asks for it: {name}" for name in sorted(pinned.keys() - resolved.keys())
    ]


def main() -> None:
    """Check every Python version and say what is wrong."""
    pinned = pins((ROOT / "constraints.txt").read_text().splitlines())
    wrong = {python: faults(pinned, resolve(python)) for python in PYTHONS}
    for python, lines in wrong.items():
        sys.stdout.write("".join(f"Python {python}: {line}\n" for line in lines))
    if any(wrong.values()):
        raise SystemExit("constraints.txt is not complete")
    sys.stdout.write(f"{len(pinned)} pins fit Python {', '.join(PYTHONS)}\n")


if __name__ == "__main__":
    main()
