"""One safetensors file: its header checked against the file's real size, its tensors mapped on demand. Reads only.

Layout: u64 header length, JSON header {name: {dtype, shape, data_offsets}}, then the data; offsets count from its
start. The format allows neither holes nor overlaps: every byte of the data belongs to exactly one tensor. The header is
parsed here rather than by the library so that damage is reported with the tensor it hits, and FP4 (`F4`, two codes per
byte) can be handed out as packed bytes.
"""

import mmap
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from loaders.errors import CheckpointError
from loaders.json_text import parse_json
from loaders.source import TensorMeta

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.uint8,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


class SafetensorsFile:
    """Header of one file and, once a tensor is asked for, a read-only mapping of its bytes."""

    def __init__(self, path: Path) -> None:
        """Read and check the header.

        Raises:
            CheckpointError: not a safetensors file, damaged, truncated, or a dtype this service cannot read.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                header, self._data_start = _read_header(path, file.read(_LENGTH_BYTES), file.read, size)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        self._begins: dict[str, int] = {}
        self.metas: dict[str, TensorMeta] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                self._add(name, entry)
        self._check_ranges(size)
        self._bytes: torch.Tensor | None = None

    def _add(self, name: str, entry: Any) -> None:
        where = f"{self.path}: tensor '{name}'"
        try:
            label, (begin, end), shape = entry["dtype"], entry["data_offsets"], tuple(entry["shape"])
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{where}: damaged header entry {entry!r}; download the file again") from error
        if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
            raise CheckpointError(f"{where}: damaged header entry {entry!r}; download the file again")
        if not isinstance(label, str) or label not in _DTYPES:
            raise CheckpointError(f"{where}: dtype {label} is not supported; known are {', '.join(_DTYPES)}")
        if label == "F4":
            if not shape or shape[-1] % 2:
                raise CheckpointError(f"{where}: FP4 needs an even last dimension, found shape {list(shape)}")
            shape = (*shape[:-1], shape[-1] // 2)
        meta = TensorMeta(name, _DTYPES[label], shape, str(self.path))
        if end - begin != meta.nbytes:
            raise CheckpointError(
                f"{where}: {label} {list(shape)} takes {meta.nbytes} bytes, but the header gives it {end - begin}"
            )
        self.metas[name] = meta
        self._begins[name] = begin

    def _check_ranges(self, size: int) -> None:
        """Check in file order that each tensor begins where the one before it ends."""
        data_size = size - self._data_start
        for name, meta in self.metas.items():
            end = self._begins[name] + meta.nbytes
            if end > data_size:
                raise CheckpointError(
                    f"{meta.where}: the file is truncated: the tensor ends at byte {self._data_start + end}, "
                    f"the file has {size}; download it again"
                )
        position, before = 0, "the header"
        for name, meta in sorted(self.metas.items(), key=lambda item: (self._begins[item[0]], item[1].nbytes)):
            begin = self._begins[name]
            if begin < position:
                raise CheckpointError(
                    f"{meta.where}: its data begins {position - begin} bytes before {before} ends; two tensors must "
                    "not share bytes, the file is damaged"
                )
            if begin > position:
                raise CheckpointError(
                    f"{meta.where}: {begin - position} bytes between {before} and its data belong to no tensor; "
                    "the file is damaged"
                )
            position, before = begin + meta.nbytes, f"tensor '{name}'"
        if position < data_size:
            raise CheckpointError(
                f"{self.path}: {data_size - position} bytes follow the last tensor; the file is damaged"
            )

    def view(self, name: str) -> torch.Tensor:
        """The tensor as a view of the mapped file. Writing to it would crash the process."""
        meta = self.metas[name]
        if not meta.nbytes:
            return torch.empty(meta.shape, dtype=meta.dtype)
        if self._bytes is None:
            self._bytes = _map_file(self.path)
        offset = self._data_start + self._begins[name]
        raw = self._bytes[offset : offset + meta.nbytes]
        if offset % meta.dtype.itemsize:
            raw = raw.clone()
        return raw.view(meta.dtype).view(meta.shape)


def _map_file(path: Path) -> torch.Tensor:
    """All bytes of a file, mapped; the tensor keeps the mapping alive."""
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # torch cannot mark a tensor read-only and warns about it; our callers copy and never write. The filter stays:
    # `warnings.catch_warnings` replaces the filters of all threads.
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _read_header(path: Path, prefix: bytes, read: Any, size: int) -> tuple[dict[str, Any], int]:
    """Parsed header and the position of the data."""
    if prefix == b"version ":
        raise CheckpointError(f"{path}: this is a git-lfs pointer, not the file itself; run 'git lfs pull'")
    length = int.from_bytes(prefix, "little")
    if len(prefix) < _LENGTH_BYTES or length > _MAX_HEADER_BYTES or _LENGTH_BYTES + length > size:
        raise CheckpointError(
            f"{path}: truncated or no safetensors file: the header should take {length} bytes, "
            f"the file has {size}; download it again"
        )
    try:
        header = parse_json(read(length), lambda pairs: _unique(path, pairs))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: the header is not valid JSON ({error}); download the file again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object; download the file again")
    return header, _LENGTH_BYTES + length


def _unique(path: Path, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise CheckpointError(f"{path}: tensor '{name}' appears twice in the header")
        entries[name] = value
    return entries
