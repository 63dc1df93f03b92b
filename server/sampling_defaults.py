"""`SamplingDefaults`: sampling parameters where a request leaves them out, and how a checkpoint states them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.errors import SettingError


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingDefaults:
    """Used where a request leaves a parameter out: the operator's, else the checkpoint's, else OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """What generation_config.json sets; `do_sample: false` without a temperature means greedy."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return SamplingDefaults()
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        known = {name: content[name] for name in SamplingDefaults.__slots__ if content.get(name) is not None}
        if content.get("do_sample") is False:
            known.setdefault("temperature", 0.0)
        return SamplingDefaults(**{name: type(getattr(SamplingDefaults(), name))(v) for name, v in known.items()})
    except (ValueError, TypeError, AttributeError) as error:
        raise SettingError(f"--model: {path} cannot be read: {error}") from error
