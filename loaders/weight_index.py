"""The index beside several safetensors files: which file holds which tensor. Opens none of them."""

from pathlib import Path, PurePosixPath

from loaders.errors import CheckpointError
from loaders.json_text import parse_json


def read_index(path: Path) -> dict[str, str]:
    """File names by tensor, normalised: `./a` is `a`.

    Raises:
        CheckpointError: not an index, or an entry that names no file of its folder.
    """
    try:
        listed = {**parse_json(path.read_bytes())["weight_map"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a safetensors index with a 'weight_map' ({error!r})") from error
    normal: dict[str, str] = {}
    for name, file in listed.items():
        if isinstance(file, str) and file in normal:
            continue
        relative = PurePosixPath(file if isinstance(file, str) else "")
        if not relative.name:
            raise CheckpointError(
                f"{path}: the entry of tensor '{name}' is {file!r}, which names no file: the index is damaged; "
                "download it again, or take another upload of the model"
            )
        if relative.is_absolute() or ".." in relative.parts:
            raise CheckpointError(f"{path}: tensor '{name}' points outside the folder: {file}")
        normal[file] = str(relative)
    return {name: normal[file] for name, file in listed.items()}
