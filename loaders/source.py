"""`TensorSource`: named tensors with bookkeeping of what was used. Knows no file format and no model.

A family pulls what it needs by name, declares what it skips, and calls `finish()`: what nobody asked for is an error.
"""

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch

from loaders.errors import CheckpointError

_log = logging.getLogger(__name__)
_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What a header says about one tensor. `stored_as` is its name in the file where that differs from `name`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    stored_as: str | None = None

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def where(self) -> str:
        """File and tensor, for messages."""
        stored = f" (read as '{self.name}')" if self.stored_as else ""
        return f"{self.file}: tensor '{self.stored_as or self.name}'{stored}"

    def expect(self, shape: tuple[int, ...] | None = None, dtypes: Collection[torch.dtype] | None = None) -> Self:
        """Itself, if it has this shape and one of these dtypes.

        Raises:
            CheckpointError: names file, tensor, expected and found.
        """
        if shape is not None and self.shape != shape:
            raise CheckpointError(f"{self.where}: expected shape {list(shape)}, found {list(self.shape)}")
        if dtypes is not None and self.dtype not in dtypes:
            expected = " or ".join(dtype_name(d) for d in dtypes)
            raise CheckpointError(f"{self.where}: expected dtype {expected}, found {dtype_name(self.dtype)}")
        return self


class TensorSource(ABC):
    """Tensors by name; remembers which were read, and refuses to finish while some were not."""

    def __init__(self, origin: str, metas: Mapping[str, TensorMeta]) -> None:
        self.origin = origin
        self._metas = dict(metas)
        self._open_names = set(self._metas)
        self.num_bytes_read = 0  # sizes of the tensors used, each once; one that is read in part counts whole
        self._counting = threading.Lock()  # a layer may be read ahead in a thread

    @abstractmethod
    def _map(self, meta: TensorMeta) -> torch.Tensor:
        """The tensor's contents, without a copy where that is possible."""

    def names(self) -> list[str]:
        """All tensor names, in file order."""
        return list(self._metas)

    def __contains__(self, name: str) -> bool:
        return name in self._metas

    def meta(self, name: str) -> TensorMeta:
        """Dtype, shape and file of a tensor, from the header alone.

        Raises:
            CheckpointError: no such tensor.
        """
        try:
            return self._metas[name]
        except KeyError:
            raise CheckpointError(
                f"{self.origin}: tensor '{name}' is missing; the checkpoint is incomplete or of another architecture"
            ) from None

    def expect(
        self, name: str, *, shape: tuple[int, ...] | None = None, dtypes: Collection[torch.dtype] | None = None
    ) -> TensorMeta:
        """Like `meta`, but the header must show this shape and one of these dtypes.

        Raises:
            CheckpointError: missing, or another shape or dtype; names file, tensor, expected and found.
        """
        return self.meta(name).expect(shape, dtypes)

    def view(self, name: str) -> torch.Tensor:
        """Contents for reading only, possibly mapped from the file: copy what you keep, never write. Marks as used."""
        meta = self.meta(name)
        with self._counting:
            if name in self._open_names:
                self.num_bytes_read += meta.nbytes
                self._open_names.remove(name)
        return self._map(meta)

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor in memory of its own. Marks as used."""
        return self.view(name).clone()

    def mark_used(self, names: Iterable[str]) -> None:
        """Count tensors as used without reading them: another rank holds them."""
        self._open_names.difference_update(names)

    def skip(self, names: Iterable[str], reason: str) -> None:
        """Leave tensors out on purpose, unread; logs one line with their count and size."""
        skipped = [self.meta(name) for name in names]
        if skipped:
            size_mb = sum(meta.nbytes for meta in skipped) / 1e6
            _log.info("skipped %d tensors (%.1f MB): %s", len(skipped), size_mb, reason)
            self.mark_used(meta.name for meta in skipped)

    def finish(self) -> None:
        """Check that every tensor was read, counted or skipped.

        Raises:
            CheckpointError: tensors that nobody used.
        """
        left = [self._metas[name] for name in self._metas if name in self._open_names]
        if left:
            shown = "; ".join(meta.where for meta in left[:_NAMES_SHOWN])
            more = f"; and {len(left) - _NAMES_SHOWN} more" if len(left) > _NAMES_SHOWN else ""
            raise CheckpointError(f"{self.origin}: {len(left)} tensors belong to no part of the model: {shown}{more}")


def dtype_name(dtype: torch.dtype) -> str:
    """`float8_e4m3fn` rather than `torch.float8_e4m3fn`."""
    return str(dtype).removeprefix("torch.")
