"""What config.json says about rotary positions, in all its spellings, checked.

transformers 5 writes `rope_parameters`; before, there were `rope_scaling` and, at top level, `rope_theta`. What a
config leaves out gets the value that transformers gives it.
"""

from dataclasses import dataclass, replace
from typing import Literal

from loaders.errors import ModelConfigError
from loaders.hf_config import HfConfig
from model.config import flag, positive_int, positive_number, require_supported
from model.errors import UnsupportedModelError

RopeType = Literal["default", "yarn"]
_KEYS = ("rope_parameters", "rope_scaling")
_THETA = "rope_theta"
_MAX_SCALE = 1000  # published ones are near 1


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding parameters. `mscale*` and `attention_factor` are None where the files do not give them."""

    theta: float
    rope_type: RopeType = "default"
    factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int | None = None
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None


def read_rope(config: HfConfig, default: RopeConfig) -> RopeConfig:
    """The rope of a config; `default` is what its architecture has where the config says nothing.

    Raises:
        ModelConfigError: (of the loaders) a key that is missing or has the wrong type.
        UnsupportedModelError: a value that is out of range or not implemented, or two keys that contradict each other.
    """
    require_supported(config, "partial_rotary_factor", (1,))
    sections = [section for section in map(config.section, _KEYS) if section.raw]
    with_theta = next((each for each in (*sections, config) if each.raw.get(_THETA) is not None), config)
    theta = _theta(with_theta, default.theta)
    if not sections:  # to transformers an empty `rope_parameters` is plain rope, but an empty `rope_scaling` is nothing
        return RopeConfig(theta=theta) if config.raw.get("rope_parameters") == {} else replace(default, theta=theta)
    ropes = [_read(section, config, _theta(section, theta)) for section in sections]
    if ropes[0] != ropes[-1]:
        raise UnsupportedModelError(
            f"{config.path}: rope_parameters and rope_scaling contradict each other: remove the one that is not meant"
        )
    return ropes[0]


def _theta(section: HfConfig, default: float) -> float:
    theta = positive_number(section, _THETA, default)
    if theta <= 1:
        raise UnsupportedModelError(f"{section.where}: {_THETA} is {theta:g}: it must be above 1")
    return theta


def _read(section: HfConfig, config: HfConfig, theta: float) -> RopeConfig:
    require_supported(section, "partial_rotary_factor", (1,))
    nested = [key for key, value in section.raw.items() if isinstance(value, dict)]
    if nested:
        raise UnsupportedModelError(
            f"{section.where}: a rope for each kind of layer ({', '.join(nested)}) is not supported: give one for all"
        )
    if _rope_type(section) == "default":
        return RopeConfig(theta=theta)
    return RopeConfig(
        theta=theta,
        rope_type="yarn",
        factor=positive_number(section, "factor"),
        beta_fast=positive_number(section, "beta_fast", RopeConfig.beta_fast),
        beta_slow=positive_number(section, "beta_slow", RopeConfig.beta_slow),
        original_max_position_embeddings=_original_length(section, config),
        truncate=flag(section, "truncate", "truncate" not in section.raw),  # null is false
        mscale=_mscale(section, "mscale"),
        mscale_all_dim=_mscale(section, "mscale_all_dim"),
        attention_factor=None if section.get("attention_factor") is None else _scale(section, "attention_factor"),
    )


def _rope_type(section: HfConfig) -> RopeType:
    key = "rope_type" if "rope_type" in section.raw else "type"
    kind = section.raw.get(key, "default")
    if not isinstance(kind, str) or not kind:
        raise ModelConfigError(f"{section.where}: key '{key}' must be the name of a rope type, found {kind!r}")
    if key not in section.raw and section.get("factor") is not None:
        raise ModelConfigError(f"{section.where}: it has a factor, but no rope_type: add one, such as 'yarn'")
    require_supported(section, key, ("default", "yarn"))
    return "yarn" if kind == "yarn" else "default"


def _original_length(section: HfConfig, config: HfConfig) -> int:
    """Tokens of the context before it was stretched. As in transformers the key at top level wins, and the last resort
    is the whole context; `initial_context_length`, which only OpenAI's files have, is read here alone.
    """
    key = "original_max_position_embeddings"
    for place in (config, section):
        if place.get(key) is not None:
            return positive_int(place, key)
    return positive_int(config, "initial_context_length", config.max_position_embeddings)


def _mscale(section: HfConfig, key: str) -> float | None:
    """None for 0 too: published code takes it for missing."""
    return _scale(section, key) if section.get(key) else None


def _scale(section: HfConfig, key: str) -> float:
    value = positive_number(section, key)
    if value > _MAX_SCALE:
        raise UnsupportedModelError(f"{section.where}: {key} is {value:g}: it must be at most {_MAX_SCALE}")
    return value
