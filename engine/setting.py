"""`setting` declares a field of a config once: default, group, words and limits. `check_settings` enforces the limits.

The flag, the environment variable, the key of the settings file, `--help` and docs/settings.md all follow from the
declaration (`server.settings`). A field's choices are its `Literal` type.
"""

import dataclasses
from typing import Any, Literal, get_args, get_origin, get_type_hints

Group = Literal["model", "HTTP", "engine", "mixture of experts", "several ranks"]
"""Headings of `--help`, in their order."""

_KEY = "setting"  # in the metadata of a field
_LARGEST_INT, _LARGEST_FLOAT = 2**31 - 1, 10**9  # of settings that declare no `high`; 10^9 s are 31 years


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SettingSpec:
    """What a declaration says beside the field's name, type and default.

    `default_text` replaces a default of None or () in help. `low` and `high` are the smallest and the largest number
    that is allowed, `above` is a number below the smallest. Without `high`, numbers are bounded all the same, so that
    none overflows in a library. A secret that is set must have a value: an empty one is refused, not taken for unset.
    `bare` is what the flag means without a value, if it may lack one.
    """

    group: Group
    text: str
    default_text: str = "none"
    low: float | None = None
    above: float | None = None
    high: float | None = None
    is_secret: bool = False
    bare: str | None = None

    def allows(self, value: float) -> bool:
        """Whether a number is within the limits; NaN never is."""
        return (
            (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and value <= self._largest(value)
        )

    def broken_rule(self, value: float) -> str:
        """What a number that is not allowed breaks, after "it must"."""
        if self.high is None and not value <= self._largest(value):  # a NaN too
            return f"be at most {self._largest(value)}"
        return self.rule()

    def rule(self) -> str:
        """The declared limits, after "it must"; empty if there are none."""
        if self.low is not None and self.high is not None:
            return f"lie between {self.low} and {self.high}"
        limits = [
            *([] if self.low is None else [f"at least {self.low}"]),
            *([] if self.above is None else [f"above {self.above}"]),
            *([] if self.high is None else [f"at most {self.high}"]),
        ]
        return "be " + " and ".join(limits) if limits else ""

    def _largest(self, value: float) -> float:
        if self.high is not None:
            return self.high
        return _LARGEST_FLOAT if isinstance(value, float) else _LARGEST_INT


def setting(default: Any, group: Group, text: str, **limits: Any) -> Any:
    """A dataclass field with a default. `limits` are the other fields of `SettingSpec`."""
    return dataclasses.field(default=default, metadata=described(group, text, **limits))


def described(group: Group, text: str, **limits: Any) -> dict[str, SettingSpec]:
    """Metadata of a field without a default: `dataclasses.field(metadata=described(...))`."""
    return {_KEY: SettingSpec(group=group, text=text, **limits)}


def spec_of(field: "dataclasses.Field[Any]") -> SettingSpec:
    """The declaration of a field. Raises ValueError if it was not made by `setting`."""
    spec = field.metadata.get(_KEY)
    if not isinstance(spec, SettingSpec):
        raise ValueError(f"the field {field.name} is not declared by `setting`")
    return spec


def check_settings(config: Any, error: type[ValueError]) -> None:
    """Raise `error`, naming field, value and rule, for the first field outside its choices or limits."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise error(f"{field.name} is {value!r}: it must be one of {', '.join(get_args(hint))}")
        if isinstance(value, int | float) and not spec_of(field).allows(value):
            raise error(f"{field.name} is {value}: it must {spec_of(field).broken_rule(value)}")
