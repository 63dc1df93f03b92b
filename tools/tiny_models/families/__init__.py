"""The model families that can be trained, by name; a family is imported when it is asked for."""

from importlib import import_module
from pathlib import Path

from tools.tiny_models.families.base import Family

_CLASSES = {"gpt_oss": "GptOssFamily", "deepseek_v3": "DeepseekV3Family"}
FAMILIES = tuple(_CLASSES)


def load_family(name: str, config: Path | None = None) -> Family:
    """A fresh family; `config` is another config.json, for trying out. Raises ValueError for an unknown name."""
    if name not in _CLASSES:
        raise ValueError(f"family {name!r}: it must be one of {', '.join(_CLASSES)}")
    family: Family = getattr(import_module(f"tools.tiny_models.families.{name}.family"), _CLASSES[name])(config)
    return family
