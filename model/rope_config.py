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
_THETA, _ORIGINAL = "rope_theta", "original_max_position_embeddings"
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
    if not sections:
        return _without_section(config, default)
    ropes = [_read(section, config, default.theta) for section in sections]
    if ropes[0] != ropes[-1]:
        raise UnsupportedModelError(
            f"{config.path}: rope_parameters and rope_scaling contradict each other: remove the one that is not meant"
        )
    return ropes[0]


def _without_section(config: HfConfig, default: RopeConfig) -> RopeConfig:
    """To transformers an empty `rope_parameters` is plain rope, but an empty `rope_scaling` is nothing."""
    theta, length = _theta(config, default.theta), default.original_max_position_embeddings
    if config.raw.get("rope_parameters") == {}:
        return RopeConfig(theta=theta)
    if length is not None:
        length = positive_int(config, _ORIGINAL, length)
    return replace(default, theta=theta, original_max_position_embeddings=length)


def _theta(place: HfConfig, default: float) -> float:
    theta = positive_number(place, _THETA, default)
    if theta <= 1:
        raise UnsupportedModelError(f"{place.where}: {_THETA} is {theta:g}: it must be above 1")
    return theta


def _read(section: HfConfig, config: HfConfig, default_theta: float) -> RopeConfig:
    """The rope of one section. What it lacks comes from the top level, never from another section."""
    require_supported(section, "partial_rotary_factor", (1,))
    nested = [key for key, value in section.raw.items() if isinstance(value, dict)]
    if nested:
        raise UnsupportedModelError(
            f"{section.where}: a rope for each kind of layer ({', '.join(nested)}) is not supported: give one for all"
        )
    theta = _theta(config if section.get(_THETA) is None else section, default_theta)
    if _rope_type(section) == "default":
        return RopeConfig(theta=theta)
    length = _original_length(section, config)
    is_null = section.raw.get("factor", 1) is None  # then transformers takes the ratio of the two contexts
    return RopeConfig(
        theta=theta,
        rope_type="yarn",
        factor=config.max_position_embeddings / length if is_null else positive_number(section, "factor"),
        beta_fast=positive_number(section, "beta_fast", RopeConfig.beta_fast),
        beta_slow=positive_number(section, "beta_slow", RopeConfig.beta_slow),
        original_max_position_embeddings=length,
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
    for place in (config, section):
        if place.get(_ORIGINAL) is not None:
            return positive_int(place, _ORIGINAL)
    return positive_int(config, "initial_context_length", config.max_position_embeddings)


def _mscale(section: HfConfig, key: str) -> float | None:
    """None for 0 too: published code takes it for missing."""
    return _scale(section, key) if section.get(key) else None


def _scale(section: HfConfig, key: str) -> float:
    value = positive_number(section, key)
    if value > _MAX_SCALE:
        raise UnsupportedModelError(f"{section.where}: {key} is {value:g}: it must be at most {_MAX_SCALE}")
    return value
