"""`fingerprint`: tells whether two copies of a model folder are the same, without reading them whole.

Of a file of weights it reads the header and a few bytes in `_NUM_SAMPLES` places: another revision of a model may have
the same shapes and sizes, but has other numbers almost everywhere.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from loaders.checkpoint import find_index
from loaders.errors import CheckpointError, ModelConfigError
from loaders.json_text import read_object
from loaders.weight_index import read_index

_CONFIGS = (
    "config.json", "hf_quant_config.json", "generation_config.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
_NOTES = ("_name_or_path", "transformers_version", "chat_template")  # who wrote a file, and what only host 0 reads
_TOKENIZER = "tokenizer.json"  # every rank that schedules compiles grammars for it
_NUM_SAMPLES = 32
_SAMPLE_BYTES = 64
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def fingerprint(folder: Path, *, reads_weights: bool = True) -> dict[str, str]:
    """A digest by name of each file that says what the model computes and which tokens it writes.

    Files that are missing are left out.

    Raises:
        CheckpointError, ModelConfigError: a file that is there cannot be read.
    """
    digests = {}
    for name in _CONFIGS:
        if (folder / name).is_file():
            content = {
                key: value for key, value in read_object(folder / name, ModelConfigError).items() if key not in _NOTES
            }
            digests[name] = digest([json.dumps(content, sort_keys=True).encode()])
    readers = {folder / _TOKENIZER: _whole}
    if reads_weights:
        readers |= dict.fromkeys(_weight_files(folder), _samples)
    for path, read in readers.items():
        if not path.is_file():
            continue
        try:
            digests[path.name] = digest(read(path))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    return digests


def digest(parts: Iterable[bytes]) -> str:
    """A short name for this content."""
    content = hashlib.blake2b(digest_size=12)
    for part in parts:
        content.update(part)
    return content.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    """Those that `Checkpoint.open` reads."""
    index = find_index(folder)
    if index is None:
        return sorted(folder.glob("*.safetensors"))
    return [folder / name for name in sorted(set(read_index(index).values()))]


def _whole(path: Path) -> Iterable[bytes]:
    yield path.read_bytes()


def _samples(path: Path) -> Iterable[bytes]:
    """Size, header and some bytes of the data."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # else each of them reads what follows, too
        size = os.fstat(file).st_size
        start = 8 + min(int.from_bytes(os.pread(file, 8, 0), "little"), _MAX_HEADER_BYTES)
        yield size.to_bytes(8)
        yield os.pread(file, start, 0)
        for number in range(_NUM_SAMPLES):
            yield os.pread(file, _SAMPLE_BYTES, start + (size - start) * number // _NUM_SAMPLES)
    finally:
        os.close(file)
