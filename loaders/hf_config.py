"""config.json, generation_config.json and hf_quant_config.json, with the spellings of several versions made one.

What the numbers mean for a model is the model's business; here they are only found, checked and named.
"""

import reprlib
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from loaders.end_tokens import end_token_ids
from loaders.errors import ModelConfigError
from loaders.json_text import read_object, read_optional_object
from loaders.quant_config import QuantScheme, read_quant_scheme


@dataclass(frozen=True, kw_only=True)
class HfConfig:
    """The raw dictionary of config.json, or of an object in it, plus what has more than one spelling."""

    path: Path
    raw: dict[str, Any]
    generation: dict[str, Any]
    quantization: QuantScheme | None
    inside: str = ""  # key of the object that `raw` is; "" for the whole file

    @property
    def where(self) -> str:
        """File, and the object in it if it is not the whole, for messages."""
        return f"{self.path}, '{self.inside}'" if self.inside else str(self.path)

    def section(self, key: str) -> Self:
        """The object under a key, empty if it is missing or null.

        Raises:
            ModelConfigError: something else than an object.
        """
        return replace(self, raw={} if self.raw.get(key) is None else self.require(key, dict), inside=key)

    def require(self, key: str, kind: type | tuple[type, ...] | None = None) -> Any:
        """Value of a key that must be there and not null; `kind` also checks its type.

        An int passes as float. A float must be finite.

        Raises:
            ModelConfigError: names key and file.
        """
        value = self.raw.get(key)
        if value is None:
            raise ModelConfigError(f"{self.where}: key '{key}' is missing")
        if kind is not None and not _is_kind(value, kind):
            raise ModelConfigError(f"{self.where}: key '{key}' must be {_kind_name(kind)}, found {reprlib.repr(value)}")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a key, or `default` if it is missing or null."""
        value = self.raw.get(key)
        return default if value is None else value

    @property
    def architecture(self) -> str:
        """First entry of `architectures`, such as "GptOssForCausalLM"."""
        names = self.require("architectures", list)
        if not names or not isinstance(names[0], str):
            raise ModelConfigError(f"{self.path}: key 'architectures' must name a class, found {names!r}")
        return names[0]

    @property
    def max_position_embeddings(self) -> int:
        """Longest context in tokens."""
        key = "max_position_embeddings"
        value: int = self.require(key, int)
        if not 2 <= value <= _MOST_POSITIONS:  # a token of prompt and one of answer
            found = reprlib.repr(value)
            raise ModelConfigError(f"{self.path}: key '{key}' must lie in 2..{_MOST_POSITIONS}, found {found}")
        return value

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of config.json and generation_config.json together, each once.

        Raises:
            ModelConfigError: something else than ids below `vocab_size`.
        """
        return end_token_ids(self.path.parent, self.raw, self.generation)


_KIND_NAMES = {
    int: "a whole number", float: "a finite number", bool: "true or false", str: "a string", list: "a list",
    dict: "an object",
}  # fmt: skip
_QUANT_KEYS = ("quantization_config", "compression_config", "quantization")  # the last two: old or foreign exports
_MOST_POSITIONS = 1 << 24  # beyond it a position is not exact in fp32, in which rope works out its angles


def read_config(folder: Path) -> HfConfig:
    """Read the JSON files of a model folder.

    Raises:
        ModelConfigError: no folder, no config.json, a file that is not a JSON object, or a quantization format that no
            reader understands.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelConfigError(f"{folder}: no such folder; give the folder that holds config.json")
    if not path.is_file():
        raise ModelConfigError(f"{path}: missing; {folder} is no model folder, or its download is unfinished")
    raw = read_object(path, ModelConfigError)
    return HfConfig(
        path=path,
        raw=raw,
        generation=read_optional_object(folder / "generation_config.json", ModelConfigError) or {},
        quantization=read_quant_scheme(
            path,
            next((raw[key] for key in _QUANT_KEYS if raw.get(key) is not None), None),
            read_optional_object(folder / "hf_quant_config.json", ModelConfigError),
        ),
    )


def _is_kind(value: Any, kind: type | tuple[type, ...]) -> bool:
    """isinstance, but an int passes as float, a float must be finite, and a bool passes only as bool."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int | float):
        return (isinstance(value, int) and int in kinds) or (float in kinds and abs(value) <= sys.float_info.max)
    return isinstance(value, kinds)


def _kind_name(kind: type | tuple[type, ...]) -> str:
    return " or ".join(_KIND_NAMES[k] for k in (kind if isinstance(kind, tuple) else (kind,)))
