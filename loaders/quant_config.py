"""`QuantScheme`: how a checkpoint says it was quantized. A hint only: the readers decide by dtype and shape.

Two homes: `quantization_config` in config.json (fp8, mxfp4, quark, newer ModelOpt) and hf_quant_config.json (ModelOpt).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loaders.errors import ModelConfigError

SUPPORTED_BLOCK = (128, 128)
_IGNORE_KEYS = ("ignore", "exclude_modules", "exclude", "modules_to_not_convert", "ignored_layers")


@dataclass(frozen=True, kw_only=True)
class QuantScheme:
    """Normalised quantization settings. `ignore` keeps the file's glob or regex entries as they are."""

    method: str  # fp8, mxfp4, modelopt, quark, ...
    algorithm: str | None = None  # ModelOpt: NVFP4 or FP8
    weight_block_size: tuple[int, int] | None = None
    group_size: int | None = None
    kv_cache_algorithm: str | None = None
    ignore: tuple[str, ...] = ()


def read_quant_scheme(
    path: Path, section: Mapping[str, Any] | None, modelopt_file: Mapping[str, Any] | None
) -> QuantScheme | None:
    """Merge both homes; `section` is config.json's, `modelopt_file` the whole of hf_quant_config.json.

    Raises:
        ModelConfigError: they contradict each other, or a block size other than 128 x 128.
    """
    merged: dict[str, Any] = {}
    if modelopt_file is not None:
        inner = modelopt_file.get("quantization")
        if not isinstance(inner, Mapping):
            raise ModelConfigError(f"{path.with_name('hf_quant_config.json')}: key 'quantization' is missing")
        merged = {**inner, "quant_method": "modelopt"}
    if section is not None:
        if not isinstance(section, Mapping):
            raise ModelConfigError(f"{path}: key 'quantization_config' must be an object, found {section!r}")
        for key in ("quant_method", "quant_algo"):
            ours, theirs = section.get(key), merged.get(key)
            if ours is not None and theirs is not None and not str(ours).startswith(str(theirs)):
                raise ModelConfigError(f"{path} says {key} '{ours}', hf_quant_config.json says '{theirs}'")
        merged |= {key: value for key, value in section.items() if value is not None}
    if not merged:
        return None
    if not isinstance(merged.get("quant_method"), str):
        raise ModelConfigError(f"{path}: 'quantization_config' lacks the key 'quant_method'")
    return QuantScheme(
        method=merged["quant_method"],
        algorithm=merged.get("quant_algo"),
        weight_block_size=_block_size(path, merged.get("weight_block_size")),
        group_size=merged.get("group_size"),
        kv_cache_algorithm=_kv_cache_algorithm(merged),
        ignore=next((tuple(merged[key]) for key in _IGNORE_KEYS if merged.get(key)), ()),
    )


def _block_size(path: Path, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or tuple(value) != SUPPORTED_BLOCK:
        raise ModelConfigError(
            f"{path}: 'weight_block_size' is {value!r}; only {list(SUPPORTED_BLOCK)} blocks are supported"
        )
    return SUPPORTED_BLOCK


def _kv_cache_algorithm(merged: Mapping[str, Any]) -> str | None:
    """`kv_cache_quant_algo` ("FP8"), or what `kv_cache_scheme` of newer exports describes."""
    scheme = merged.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and scheme.get("type") == "float" and scheme.get("num_bits") == 8:
        return "FP8"
    algorithm = merged.get("kv_cache_quant_algo")
    return None if algorithm is None else str(algorithm)
