"""Settings of one model, and the small checks that every family runs over `config.json`."""

import reprlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from loaders.hf_config import HfConfig
from model.balance import BalanceSettings
from model.errors import ModelError, ModelSettingsError, UnsupportedModelError
from model.parallel import ParallelLayout
from moe import MoeA2ABackend, MoeBackend
from moe.dispatch.deepep_settings import DeepepSettings
from moe.tune.layers import TuningSettings

__all__ = ["ModelError", "ModelSettings", "ModelSettingsError", "UnsupportedModelError"]

RouterDtype = Literal["auto", "float32", "bfloat16"]
LoadFormat = Literal["auto", "dummy"]
SelfCheck = Literal["auto", "off", "first", "all"]
_CPU = torch.device("cpu")
_MOST = 2**31 - 1
_DTYPES = (torch.float32, torch.bfloat16)
_ALONE = ParallelLayout()
_DEEPEP = DeepepSettings()
_UNTUNED = TuningSettings()
_UNBALANCED = BalanceSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """How to load and run a model; what it is stands in its folder.

    `dtype` "auto" is float32 on a CPU (fastest there, and exact) and bfloat16 elsewhere. `router_logits_dtype` "auto"
    leaves the choice to the expert backend. `kv_dtype`: what the KV cache holds; "auto" is the model's dtype.
    `selfcheck`: which MoE layers are compared with their reference at load. `layout`: how the model is divided among
    ranks, and which of them this is. `deepep`: mode and token limit of the transports that have them.
    `max_num_tokens`: the largest step of a rank, for kernels that allocate by it. `tuning`: whether the kernels of the
    experts are measured at load, and where what was found is kept. `balance`: whether tokens are counted by expert, and
    whether busy experts have replicas. `one_shot_sums`: small sums over tensor-parallel GPUs may take one kernel.
    """

    device: torch.device = _CPU
    dtype: torch.dtype | Literal["auto"] = "auto"
    kv_dtype: torch.dtype | Literal["auto"] = "auto"
    moe_backend: MoeBackend = MoeBackend.AUTO
    moe_a2a_backend: MoeA2ABackend = MoeA2ABackend.NONE
    router_logits_dtype: RouterDtype = "auto"
    attention_backend: str = "auto"
    load_format: LoadFormat = "auto"
    selfcheck: SelfCheck = "auto"
    layout: ParallelLayout = _ALONE
    deepep: DeepepSettings = _DEEPEP
    max_num_tokens: int = 8192
    tuning: TuningSettings = _UNTUNED
    balance: BalanceSettings = _UNBALANCED
    one_shot_sums: bool = True

    def __post_init__(self) -> None:
        for field, choices in (
            ("router_logits_dtype", RouterDtype),
            ("load_format", LoadFormat),
            ("selfcheck", SelfCheck),
        ):
            value, known = getattr(self, field), get_args(choices)
            if value not in known:
                raise ModelSettingsError(f"{field} is {value!r}: it must be one of {', '.join(known)}")
        if self.max_num_tokens < 1:
            raise ModelSettingsError(f"max_num_tokens is {self.max_num_tokens}: it must be at least 1")
        if self.dtype != "auto" and self.dtype not in _DTYPES:
            raise ModelSettingsError(f"dtype is {self.dtype}: it must be auto, float32 or bfloat16")
        self.layout.check_transport(self.moe_a2a_backend)
        self.balance.check(self.layout)

    @property
    def checked_layers(self) -> Literal["off", "first", "all"]:
        """`selfcheck` with "auto" resolved by the device: on a GPU every layer, since each may meet another fault of a
        library there; on a CPU the first, since plain torch computes them all alike and a check takes longer.
        """
        if self.selfcheck != "auto":
            return self.selfcheck
        return "first" if self.device.type == "cpu" else "all"

    @property
    def model_dtype(self) -> torch.dtype:
        """`dtype` with "auto" resolved by the device."""
        if self.dtype != "auto":
            return self.dtype
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    @property
    def cache_dtype(self) -> torch.dtype:
        """`kv_dtype` with "auto" resolved."""
        return self.model_dtype if self.kv_dtype == "auto" else self.kv_dtype


def positive_int(config: HfConfig, key: str, default: int | None = None) -> int:
    """Read a count of at least 1.

    Raises:
        ModelConfigError: (of the loaders) missing without a default, or no whole number.
        UnsupportedModelError: below 1, or more than a tensor can have.
    """
    value: int = default if default is not None and config.raw.get(key) is None else config.require(key, int)
    if value < 1:
        raise UnsupportedModelError(f"{config.where}: {key} is {reprlib.repr(value)}: it must be at least 1")
    if value > _MOST:
        raise UnsupportedModelError(f"{config.where}: {key} is {reprlib.repr(value)}: it must be at most {_MOST}")
    return value


def positive_number(config: HfConfig, key: str, default: float | None = None) -> float:
    """Read a number above 0; missing or null gives the default.

    Raises:
        ModelConfigError: (of the loaders) missing without a default, or no finite number.
        UnsupportedModelError: 0 or below.
    """
    if default is not None and config.raw.get(key) is None:
        return default
    value = float(config.require(key, float))
    if value <= 0:
        raise UnsupportedModelError(f"{config.where}: {key} is {value:g}: it must be above 0")
    return value


def flag(config: HfConfig, key: str, default: bool) -> bool:
    """Read a true-or-false value; missing or null gives the default."""
    return default if config.raw.get(key) is None else bool(config.require(key, bool))


def first_given(config: HfConfig, *keys: str) -> str:
    """The first of several spellings of a key that the config has; the first of all if it has none.

    Raises:
        UnsupportedModelError: two spellings have different values.
    """
    given = [key for key in keys if config.raw.get(key) is not None]
    for key in given[1:]:
        if config.raw[key] != config.raw[given[0]]:
            raise UnsupportedModelError(f"{config.where}: {given[0]} and {key} contradict each other: remove one")
    return given[0] if given else keys[0]


def require_supported(config: HfConfig, key: str, supported: Collection[Any]) -> None:
    """Refuse a value this code does not implement, rather than ignore it; missing or null is fine."""
    value = config.raw.get(key)
    if value is not None and value not in supported:
        known = ", ".join(str(item) for item in supported)
        raise UnsupportedModelError(f"{config.where}: {key} {value!r} is not supported; supported: {known}")


def require_multiple(config: HfConfig, key: str, of_key: str, default: int | None = None) -> None:
    """Refuse a count that is no multiple of another one; both keys are named."""
    value, divisor = positive_int(config, key), positive_int(config, of_key, default)
    if value % divisor:
        raise UnsupportedModelError(f"{config.path}: {key} {value} must be a multiple of {of_key} {divisor}")
