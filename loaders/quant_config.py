"""`QuantScheme`: how a checkpoint says it was quantized. A hint only: the readers decide by dtype and shape.

Two homes: `quantization_config` in config.json (fp8, mxfp4, quark, newer ModelOpt) and hf_quant_config.json (ModelOpt).
If they contradict each other, the second wins: an export writes it, but often keeps the config.json of the model it was
made from. A format that no reader understands is refused here, before any weight is downloaded or read.

Where no tensors are (a plan for a model on the hub, random weights), `format_of` says what they would be.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from loaders.errors import ModelConfigError

SUPPORTED_BLOCK = (128, 128)
SUPPORTED_FORMATS = "FP8 in 128 x 128 blocks or per tensor, MXFP4, NVFP4 of ModelOpt, and plain bf16"
_IGNORE_KEYS = ("ignore", "exclude_modules", "exclude", "modules_to_not_convert", "ignored_layers")
_MODELOPT_ALGORITHMS = ("NVFP4", "FP8", "MIXED_PRECISION")  # the last says: look at the tensors
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class QuantScheme:
    """Normalised quantization settings. `ignore` keeps the file's glob or regex entries as they are.

    `weight_format`: the format of `moe.formats` that quantized linear layers have; where the files leave it open, the
    one that exports of this kind usually have.
    """

    weight_format: str
    method: str  # fp8, mxfp4, modelopt, quark or compressed-tensors
    algorithm: str | None = None  # ModelOpt: NVFP4 or FP8
    weight_block_size: tuple[int, int] | None = None
    group_size: int | None = None
    kv_cache_algorithm: str | None = None
    ignore: tuple[str, ...] = ()

    def format_of(self, layer: str) -> str:
        """The format of a linear layer, by the name of its tensors without `.weight`."""
        return "bf16" if any(_names(pattern, layer) for pattern in self.ignore) else self.weight_format


def _names(pattern: str, layer: str) -> bool:
    """Whether an entry of `ignore` names a layer or something around it, as a regex, a glob, or a part of the name."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], layer) is not None
    return fnmatchcase(layer, pattern) or fnmatchcase(layer, f"{pattern}.*") or f".{pattern}." in f".{layer}."


def read_quant_scheme(
    path: Path, section: Mapping[str, Any] | None, modelopt_file: Mapping[str, Any] | None
) -> QuantScheme | None:
    """Merge both homes; `section` is config.json's, `modelopt_file` the whole of hf_quant_config.json.

    Raises:
        ModelConfigError: a format that no reader understands; names it and what is supported.
    """
    if section is not None and not isinstance(section, Mapping):
        raise ModelConfigError(f"{path}: key 'quantization_config' must be an object, found {section!r}")
    merged = {key: value for key, value in (section or {}).items() if value is not None}
    origin = str(path)
    if modelopt_file is not None:
        origin, merged = _merge_modelopt(path, merged, modelopt_file)
    if not merged:
        return None
    if not isinstance(merged.get("quant_method"), str):
        raise ModelConfigError(f"{path}: 'quantization_config' lacks the key 'quant_method' ({_supported()})")
    unsupported = _unsupported_format(merged)
    if unsupported is not None:
        raise ModelConfigError(
            f"{origin}: the checkpoint is quantized as {unsupported}, which is not supported ({_supported()}); "
            "take another upload of the model"
        )
    return QuantScheme(
        weight_format=_weight_format(merged),
        method=merged["quant_method"],
        algorithm=merged.get("quant_algo"),
        weight_block_size=SUPPORTED_BLOCK if merged.get("weight_block_size") is not None else None,
        group_size=merged.get("group_size"),
        kv_cache_algorithm=_kv_cache_algorithm(merged),
        ignore=_ignored(origin, merged),
    )


def _ignored(origin: str, merged: Mapping[str, Any]) -> tuple[str, ...]:
    key = next((key for key in _IGNORE_KEYS if merged.get(key)), None)
    if key is None:
        return ()
    if not isinstance(merged[key], list):
        raise ModelConfigError(f"{origin}: '{key}' of the quantization must be a list of names, found {merged[key]!r}")
    names = tuple(str(name) for name in merged[key])
    for name in names:
        if name.startswith("re:"):
            try:
                re.compile(name[3:])
            except re.error as error:
                raise ModelConfigError(
                    f"{origin}: '{key}' of the quantization: {name!r} is no regex: {error}"
                ) from error
    return names


def _weight_format(merged: Mapping[str, Any]) -> str:
    """The format of the quantized layers, of a description that `_unsupported_format` has found to be supported."""
    method = str(merged["quant_method"])
    if method == "fp8":
        return "fp8_tensor" if merged.get("weight_block_size") is None else "fp8_block"
    if method.startswith("modelopt"):
        return "fp8_tensor" if merged.get("quant_algo") == "FP8" or method == "modelopt_fp8" else "nvfp4"
    if method == "quark":
        weight = _mapping(_mapping(merged.get("global_quant_config")).get("weight"))
        return "fp8_tensor" if weight.get("dtype") == "fp8_e4m3" else "mxfp4"
    return "fp8_tensor" if method == "compressed-tensors" else "mxfp4"


def _merge_modelopt(
    path: Path, section: dict[str, Any], modelopt_file: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The files that count, for messages, and what they say: hf_quant_config.json, completed from config.json unless
    the two contradict each other.
    """
    inner, own_path = modelopt_file.get("quantization"), path.with_name("hf_quant_config.json")
    if not isinstance(inner, Mapping):
        raise ModelConfigError(f"{own_path}: key 'quantization' is missing")
    modelopt = {**inner, "quant_method": "modelopt"}
    for key in ("quant_method", "quant_algo"):
        ours, theirs = section.get(key), modelopt.get(key)
        if ours is not None and theirs is not None and not str(ours).startswith(str(theirs)):
            _log.warning(
                "%s says %s '%s', hf_quant_config.json beside it says '%s': the tensors decide", path, key, ours, theirs
            )
            return str(own_path), modelopt
    return f"{own_path} and {path.name}" if section else str(own_path), modelopt | section


def _unsupported_format(merged: Mapping[str, Any]) -> str | None:
    """The name of the format if no reader understands it, else None."""
    method = str(merged["quant_method"])
    if method == "fp8":
        block = merged.get("weight_block_size")
        is_ours = block is None or (isinstance(block, list) and tuple(block) == SUPPORTED_BLOCK)
        return None if is_ours else f"FP8 with 'weight_block_size' {block!r}"
    if method == "mxfp4":
        return None
    if method.startswith("modelopt"):
        algorithm = merged.get("quant_algo")
        return None if algorithm in (None, *_MODELOPT_ALGORITHMS) else f"{algorithm} of ModelOpt"
    if method == "quark":
        return _unsupported_quark(merged)
    if method == "compressed-tensors":
        return _unsupported_compressed_tensors(merged)
    bits = f" with {merged['bits']} bits" if isinstance(merged.get("bits"), int) else ""
    return f"{method}{bits}"


def _unsupported_quark(merged: Mapping[str, Any]) -> str | None:
    """MXFP4 and FP8 with one scale per tensor have the tensors that the readers know."""
    weight = _mapping(_mapping(merged.get("global_quant_config")).get("weight"))
    dtype, granularity = weight.get("dtype"), weight.get("qscheme")
    if not weight or (dtype == "fp4" and weight.get("group_size") == 32):
        return None
    if dtype == "fp8_e4m3" and granularity == "per_tensor":
        return None
    return f"{dtype} {granularity} of quark"


def _unsupported_compressed_tensors(merged: Mapping[str, Any]) -> str | None:
    """Only FP8 with one scale per tensor has the tensors that the readers know."""
    weights = [_mapping(_mapping(group).get("weights")) for group in _mapping(merged.get("config_groups")).values()]
    strategies = {str(group.get("strategy")) for group in weights}
    kind = merged.get("format", "compressed-tensors")
    is_fp8 = all(group.get("type") == "float" and group.get("num_bits") == 8 for group in weights)
    if kind in ("float-quantized", "naive-quantized") and strategies == {"tensor"} and is_fp8:
        return None
    return f"{kind} of compressed-tensors (scales per {', '.join(sorted(strategies)) or 'unknown part'})"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _supported() -> str:
    return f"supported: {SUPPORTED_FORMATS}"


def _kv_cache_algorithm(merged: Mapping[str, Any]) -> str | None:
    """`kv_cache_quant_algo` ("FP8"), or what `kv_cache_scheme` of newer exports describes."""
    scheme = merged.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and scheme.get("type") == "float" and scheme.get("num_bits") == 8:
        return "FP8"
    algorithm = merged.get("kv_cache_quant_algo")
    return None if algorithm is None else str(algorithm)
