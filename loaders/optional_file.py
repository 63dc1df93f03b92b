"""Whether an optional file of a model folder is there. A cache that lost files leaves links that lead nowhere."""

import os
from collections.abc import Callable
from pathlib import Path


def is_there(path: Path, error: Callable[[str], Exception]) -> bool:
    """Whether the file exists. Anything else of its name is raised as `error`, which gets the message: to take it for
    absent would change the answers in silence.
    """
    if path.is_file():
        return True
    if os.path.lexists(path):
        raise error(f"{path}: leads to no file, maybe because a cache lost it; download the model again, or remove it")
    return False
