"""Imports the packages named as arguments and writes a line of JSON about each. Imports nothing of this service.

It is a program of its own because a broken package may end the interpreter: whoever reads the lines then knows which.
"""

import errno
import importlib
import json
import sys
from types import ModuleType
from typing import Any

_FOLDER_ERRORS = (errno.EACCES, errno.ENOTDIR, errno.EPERM, errno.EROFS, errno.ENOSPC)  # it wanted to write there


def examine(name: str) -> dict[str, Any]:
    """Version and facts of a package, or why it cannot be imported; without both, it is not installed."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        return {} if error.name == name else {"error": _words(error)}
    except BaseException as error:  # whatever a package raises, the others are examined
        is_of_folder = isinstance(error, OSError) and error.errno in _FOLDER_ERRORS
        return {"error": _words(error), "lacks_folder": is_of_folder}
    facts = {"version": str(getattr(module, "__version__", "of unknown version"))}
    return facts | _torch_facts(module) if name == "torch" else facts


def _torch_facts(torch: ModuleType) -> dict[str, Any]:
    """What torch was built for, and the GPUs that it sees, or why it sees none."""
    facts: dict[str, Any] = {"cuda": torch.version.cuda, "hip": torch.version.hip, "num_gpus": 0}
    if facts["cuda"] or facts["hip"]:
        try:
            torch.cuda.init()
            facts["num_gpus"] = torch.cuda.device_count()
            facts["arch"] = _arch(torch)
        except Exception as error:
            facts["gpu_error"] = _words(error)
        try:
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        except Exception as error:
            facts["nccl_error"] = _words(error)
    return facts


def _arch(torch: ModuleType) -> str:
    """Architecture of the first GPU, such as "sm90" or "gfx942"."""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(0).gcnArchName).partition(":")[0]
    return "sm{}{}".format(*torch.cuda.get_device_capability(0))


def _words(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


if __name__ == "__main__":
    for each in sys.argv[1:]:
        sys.stdout.write("\n" + json.dumps({"package": each, **examine(each)}) + "\n")
        sys.stdout.flush()
