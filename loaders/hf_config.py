"""config.json, generation_config.json and hf_quant_config.json, with the spellings of several versions made one.

What the numbers mean for a model is the model's business; here they are only found, checked and named.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from loaders.errors import ModelConfigError
from loaders.json_text import parse_json
from loaders.quant_config import QuantScheme, read_quant_scheme


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding parameters. `mscale*` and `attention_factor` are None where the files do not give them."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int | None = None
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class HfConfig:
    """The raw dictionary of config.json plus what has more than one spelling."""

    path: Path
    raw: dict[str, Any]
    generation: dict[str, Any]
    quantization: QuantScheme | None

    def require(self, key: str, kind: type | tuple[type, ...] | None = None) -> Any:
        """Value of a key that must be there and not null; `kind` also checks its type (int passes as float).

        Raises:
            ModelConfigError: names key and file.
        """
        value = self.raw.get(key)
        if value is None:
            raise ModelConfigError(f"{self.path}: key '{key}' is missing")
        if kind is not None and not _is_kind(value, kind):
            raise ModelConfigError(f"{self.path}: key '{key}' must be {_kind_name(kind)}, found {value!r}")
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
        return int(self.require("max_position_embeddings", int))

    @cached_property
    def rope(self) -> RopeConfig:
        """From `rope_parameters` (transformers 5) or from `rope_theta` with `rope_scaling`."""
        key = "rope_parameters" if self.raw.get("rope_parameters") is not None else "rope_scaling"
        scaling = self.get(key, {})
        if not isinstance(scaling, dict):
            raise ModelConfigError(f"{self.path}: key '{key}' must be an object, found {scaling!r}")
        theta: Any = scaling.get("rope_theta", self.raw.get("rope_theta"))
        if not _is_kind(theta, float):
            raise ModelConfigError(f"{self.path}: no number for 'rope_theta', neither at top level nor in '{key}'")
        rope_type = str(scaling.get("rope_type") or scaling.get("type") or "default")
        if rope_type != "default" and not _is_kind(scaling.get("factor"), float):
            raise ModelConfigError(f"{self.path}: '{key}' of type '{rope_type}' needs a number 'factor'")
        original = scaling.get("original_max_position_embeddings") or self.raw.get("initial_context_length")
        if original is None and rope_type != "default":
            original = self.max_position_embeddings
        given = {name: scaling[name] for name in _ROPE_FIELDS if scaling.get(name) is not None}
        return RopeConfig(theta=float(theta), rope_type=rope_type, original_max_position_embeddings=original, **given)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of config.json and generation_config.json together, each once."""
        ids: dict[int, None] = {}
        for source in (self.raw, self.generation):
            value = source.get("eos_token_id")
            for token_id in value if isinstance(value, list) else [] if value is None else [value]:
                if not _is_kind(token_id, int):
                    raise ModelConfigError(f"{self.path.parent}: 'eos_token_id' must hold ids, found {value!r}")
                ids[token_id] = None
        return tuple(ids)


_QUANT_KEYS = ("quantization_config", "compression_config", "quantization")  # the last two: old or foreign exports
_ROPE_FIELDS = ("factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor")


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
    raw = _read_object(path)
    generation_path, quant_path = folder / "generation_config.json", folder / "hf_quant_config.json"
    return HfConfig(
        path=path,
        raw=raw,
        generation=_read_object(generation_path) if generation_path.is_file() else {},
        quantization=read_quant_scheme(
            path,
            next((raw[key] for key in _QUANT_KEYS if raw.get(key) is not None), None),
            _read_object(quant_path) if quant_path.is_file() else None,
        ),
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path}: must hold a JSON object")
    return value


def _is_kind(value: Any, kind: type | tuple[type, ...]) -> bool:
    """isinstance, but an int passes as float and a bool passes only as bool."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))


def _kind_name(kind: type | tuple[type, ...]) -> str:
    return " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
