"""`Checkpoint`: the safetensors of a model folder, opened by their headers alone. Knows files, no model names.

Accepts one file, a folder with an index, or a folder of files without one. Everything else gets an error that says
what was found and what to do about it. An index says which files belong to the model, the files say what is in them.
"""

import logging
from pathlib import Path
from typing import Self

import torch

from loaders.errors import CheckpointError
from loaders.foreign_layouts import refuse_foreign_layout
from loaders.safetensors_file import SafetensorsFile
from loaders.source import TensorMeta, TensorSource
from loaders.weight_index import read_index

__all__ = ["Checkpoint", "TensorMeta", "TensorSource"]

_log = logging.getLogger(__name__)
_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_OTHER_KINDS = {".bin": "PyTorch pickles", ".pth": "PyTorch pickles", ".pt": "PyTorch pickles", ".gguf": "GGUF"}


class Checkpoint(TensorSource):
    """All tensors of one checkpoint; nothing but headers is read before it is asked for."""

    def __init__(self, path: Path, files: list[SafetensorsFile]) -> None:
        """Join files that were opened already.

        Raises:
            CheckpointError: one tensor in two files.
        """
        metas: dict[str, TensorMeta] = {}
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in files:
            for name, meta in file.metas.items():
                if name in metas:
                    raise CheckpointError(f"tensor '{name}' is in two files: {metas[name].file} and {file.path}")
                metas[name] = meta
                self._file_of[name] = file
        super().__init__(str(path), metas)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a file, an index or a folder; reads and checks headers only.

        Raises:
            CheckpointError: nothing there, no safetensors, damaged files, an index that contradicts its files.
        """
        if not path.exists():
            raise CheckpointError(f"{path}: no such file or folder; give the folder that holds config.json")
        if path.is_dir():
            checkpoint = cls(path, _open_folder(path))
        elif path.name.endswith(_INDEX_SUFFIX):
            checkpoint = cls(path, _open_index(path))
        elif path.suffix == _SUFFIX:
            checkpoint = cls(path, [SafetensorsFile(path)])
        else:
            raise CheckpointError(f"{path}: neither a folder nor a {_SUFFIX} file")
        refuse_foreign_layout(checkpoint)
        return checkpoint

    def _map(self, meta: TensorMeta) -> torch.Tensor:
        return self._file_of[meta.name].view(meta.name)


def find_index(folder: Path) -> Path | None:
    """The index of a folder, None without one.

    Raises:
        CheckpointError: there are several.
    """
    indexes = sorted(folder.glob(f"*{_INDEX_SUFFIX}"))
    if len(indexes) > 1:
        raise CheckpointError(f"{folder}: more than one index: {', '.join(p.name for p in indexes)}; keep one")
    return indexes[0] if indexes else None


def _open_folder(folder: Path) -> list[SafetensorsFile]:
    index = find_index(folder)
    if index is not None:
        return _open_index(index)
    paths = sorted(folder.glob(f"*{_SUFFIX}"))
    if not paths:
        raise CheckpointError(_nothing_found(folder))
    return [SafetensorsFile(path) for path in paths]


def _nothing_found(folder: Path) -> str:
    if any((folder / "original").glob(f"*{_SUFFIX}")):
        return (
            f"{folder}: only the original/ layout is here; download the Hugging Face files "
            "(model-*.safetensors, in the main folder) of the same model"
        )
    kinds = {_OTHER_KINDS[p.suffix] for p in folder.iterdir() if p.suffix in _OTHER_KINDS}
    if kinds:
        return f"{folder}: holds {' and '.join(sorted(kinds))} but no safetensors; convert the model to safetensors"
    return f"{folder}: no safetensors files here; this is no checkpoint folder, or its download is unfinished"


def _open_index(path: Path) -> list[SafetensorsFile]:
    listed = read_index(path)
    files: dict[str, SafetensorsFile] = {}
    for name, file_name in listed.items():
        if file_name not in files:
            files[file_name] = _open_listed(path, name, file_name)
        if name not in files[file_name].metas:
            raise CheckpointError(f"{path} is stale: tensor '{name}' is not in {path.parent / file_name}")
    unlisted = sum(name not in listed for file in files.values() for name in file.metas)
    if unlisted:  # ModelOpt's example for DeepSeek keeps the index of the model it quantized, which has no such scales
        _log.info("%s leaves out %d tensors of its files; they count too", path, unlisted)
    single = path.parent / path.name.removesuffix(".index.json")
    if single.name not in files and single.exists():
        raise CheckpointError(f"{path.parent}: both {single.name} and {path.name} are here; remove the one not meant")
    return list(files.values())


def _open_listed(index: Path, name: str, file_name: str) -> SafetensorsFile:
    file = index.parent / file_name
    try:
        is_there = file.is_file()
    except OSError as error:  # such as a name that is too long
        raise CheckpointError(
            f"{index}: the file that it names for tensor '{name}' cannot be opened: {error}"
        ) from error
    if not is_there:
        raise CheckpointError(f"{file}: missing, but {index.name} names it for tensor '{name}'; finish the download")
    return SafetensorsFile(file)
