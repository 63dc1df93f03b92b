"""Files that a command writes at its end: checked at its begin, and replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path


def check_can_write(flag: str, path: Path) -> None:
    """Make the file's folder. Raises ValueError, which names the flag, if the file could not be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{flag} {path}: its folder cannot be made: {error}") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{flag} {path} cannot be written: give the path of a file")


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, never leaves half of it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
