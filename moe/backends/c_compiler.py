"""Checks whether Triton can build its launcher: at run time it compiles a small C file that needs Python's headers."""

import functools
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

_PROGRAM = "#include <Python.h>\n"
_TIMEOUT_S = 60


@functools.cache
def missing_for_triton() -> str | None:
    """What is missing, with the package that has it; None if a file that includes Python.h compiles here.

    The answer is cached. Call it only if Triton is installed, because Triton's settings name the compiler.
    """
    from triton import knobs

    wanted = [knobs.build.cc] if knobs.build.cc else ["gcc", "clang"]
    compiler = next((path for path in map(shutil.which, wanted) if path), None)
    if compiler is None:
        place = f"CC is {wanted[0]}, which cannot be run" if knobs.build.cc else "neither gcc nor clang is on the PATH"
        return f"a C compiler ({place}; Debian and Ubuntu: apt install gcc libc6-dev, Fedora: dnf install gcc)"
    include = _include_folder()
    command = [compiler, "-x", "c", "-", "-shared", "-fPIC", f"-I{include}", "-o", "/dev/null"]
    try:
        done = subprocess.run(
            command, input=_PROGRAM, capture_output=True, text=True, errors="replace", check=False, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"a C compiler that works ({error})"
    if done.returncode == 0:
        return None
    if not (include / "Python.h").is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return (
            f"Python's C headers ({include / 'Python.h'} does not exist; "
            f"Debian and Ubuntu: apt install python{version}-dev, Fedora: dnf install python3-devel)"
        )
    return f"a C compiler that works ({compiler} says: {_first_error(done.stderr)})"


def _include_folder() -> Path:
    """Where Triton looks for Python.h. Debian's own scheme, posix_local, names a folder without it."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths(scheme="posix_prefix" if scheme == "posix_local" else scheme)["include"])


def _first_error(text: str) -> str:
    lines = text.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "nothing")
