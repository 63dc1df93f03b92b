"""Writes a checkpoint folder: configs, index, safetensors in shards, sparse or full of random values, and a tokenizer.

A sparse shard has a true header and a hole for its data: it takes a few blocks of the disk and reads as zeros. Full
shards are written by several threads.
"""

import json
import os
import shutil
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tools.checkpoint_files.tensors import ITEM_BYTES, Tensor
from tools.checkpoint_files.values import chunks

TOKENIZER = Path(__file__).parents[2] / "assets" / "tiny-gpt-oss"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_CHUNK_BYTES = 32 * 2**20
_ALIGNMENT = 8  # of the data, as the safetensors library has it


class CheckpointFilesError(ValueError):
    """The folder cannot be written: not empty, or the disk is too small."""


class Model(Protocol):
    """What `write_checkpoint` needs to know of a model."""

    @property
    def config(self) -> dict[str, Any]:
        """config.json."""

    @property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json."""

    @property
    def more_files(self) -> dict[str, dict[str, Any]]:
        """Further JSON files by name."""

    @property
    def shard_bytes(self) -> int:
        """Most bytes of tensors in one file."""

    def shard_name(self, number: int, count: int) -> str:
        """Name of the file with this number, of 1 to `count`."""

    def tensors(self) -> Iterator[Tensor]:
        """All tensors."""


@dataclass(frozen=True, slots=True)
class _Shard:
    path: Path
    tensors: list[Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


def write_checkpoint(model: Model, folder: Path, *, is_full: bool, num_threads: int) -> int:
    """Write the folder; returns the size of all tensors in bytes.

    Raises:
        CheckpointFilesError: the folder holds files already, or the disk is too small for a full checkpoint.
    """
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointFilesError(f"{folder} is not empty: name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(model, folder)
    total_bytes = sum(shard.num_bytes for shard in shards)
    free_bytes = shutil.disk_usage(folder).free
    if is_full and total_bytes > free_bytes:
        raise CheckpointFilesError(
            f"{folder}: the checkpoint takes {total_bytes / 1e9:.1f} GB, the disk has {free_bytes / 1e9:.1f} GB left: "
            "name another disk, or write it with --sparse or fewer --layers"
        )
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": {tensor.name: shard.path.name for shard in shards for tensor in shard.tensors},
    }
    jsons = {"config.json": model.config, "generation_config.json": model.generation_config, **model.more_files}
    for name, content in (jsons | {"model.safetensors.index.json": index}).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    for name in _TOKENIZER_FILES:
        shutil.copy(TOKENIZER / name, folder / name)
    with ThreadPoolExecutor(num_threads) as threads:
        for shard in shards:
            _write_shard(shard, threads if is_full else None)
    return total_bytes


def _shards(model: Model, folder: Path) -> list[_Shard]:
    """Tensors in shards; within a shard the widest dtypes come first, so all are aligned."""
    groups: list[list[Tensor]] = [[]]
    num_bytes = 0
    for tensor in model.tensors():
        if groups[-1] and num_bytes + tensor.num_bytes > model.shard_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(tensor)
        num_bytes += tensor.num_bytes
    return [
        _Shard(
            folder / model.shard_name(number, len(groups)),
            sorted(group, key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name)),
        )
        for number, group in enumerate(groups, start=1)
    ]


def _write_shard(shard: _Shard, threads: ThreadPoolExecutor | None) -> None:
    """The header and, with `threads`, the data; without, a hole of its size."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, begin = [], 0
    for tensor in shard.tensors:
        end = begin + tensor.num_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begins.append(begin)
        begin = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    start = len(header) + _ALIGNMENT  # the length of the header takes eight bytes
    with shard.path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(start + begin)
        file.flush()
        if threads is not None:
            pieces = (
                (start + first + place, data)
                for tensor, first in zip(shard.tensors, begins, strict=True)
                for place, data in chunks(tensor, _CHUNK_BYTES)
            )
            for _ in threads.map(lambda piece: _write_at(file.fileno(), *piece), pieces):
                pass


def _write_at(descriptor: int, place: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(descriptor, data, place)
        place, data = place + written, data[written:]
