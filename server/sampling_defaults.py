"""`SamplingDefaults`: sampling parameters where a request leaves them out, and how a checkpoint states them."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loaders.json_text import read_optional_object
from server.errors import SettingError

# Lowest and highest value that the API accepts. Not read from its models, whose import would delay the engine's start.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (math.nextafter(0, 1), 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingDefaults:
    """Used where a request leaves a parameter out: the operator's, else the checkpoint's, else OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """What generation_config.json sets; `do_sample: false` means greedy, whatever the temperature.

    Raises:
        SettingError: the file is damaged, or holds a value that the API would refuse in a request.
    """
    path = folder / "generation_config.json"
    content = read_optional_object(path, lambda message: SettingError(f"--model: {message}")) or {}
    known = {name: _checked(name, content[name], path) for name in RANGES if content.get(name) is not None}
    if content.get("do_sample") is False:
        known["temperature"] = 0.0
    return SamplingDefaults(**known)


def _checked(name: str, value: Any, path: Path) -> Any:
    low, high = RANGES[name]
    kinds = (int,) if name == "top_k" else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        kind = "an integer" if name == "top_k" else "a number"
        raise SettingError(f"--model: {path}: {name} is {json.dumps(value)}: it must be {kind}")
    if not low <= value <= high:  # a NaN fails too
        above = "above 0 and at most" if name == "top_p" else f"between {low} and"
        raise SettingError(f"--model: {path}: {name} is {value}: it must be {above} {high}")
    return value if name == "top_k" else float(value)
