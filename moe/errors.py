"""Errors of the MoE core, as a tree.

ValueError
└── MoeError                 base of everything a caller can get wrong here
    ├── MoeConfigError       a setting that is out of range or contradicts another
    ├── UnsupportedPathError a backend, transport, format or device that do not go together
    ├── WeightFormatError    weights or scales whose dtype, shape or values break their format
    ├── TransportStateError  dispatch and combine called out of order, or with more tokens than agreed
    └── SelfCheckError       a path whose result differs from the reference
"""


class MoeError(ValueError):
    """Base of the errors that a caller of `moe` can cause."""


class MoeConfigError(MoeError):
    """A setting is out of range or contradicts another one."""


class UnsupportedPathError(MoeError):
    """Backend, transport, format and device do not go together; the message lists what does."""


class WeightFormatError(MoeError):
    """A weight or scale tensor breaks the rules of its number format, or gives NaN or infinity."""


class TransportStateError(MoeError):
    """Dispatch and combine were called out of order, or with more tokens than the ranks agreed on."""


class SelfCheckError(MoeError):
    """The result of the chosen path differs from the reference. The message names layer, path, expert and error."""
