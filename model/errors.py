"""Errors of this package.

ValueError
└── ModelError                 base of everything a caller can get wrong here
    ├── ModelSettingsError     a setting that is out of range, or settings that contradict each other
    └── UnsupportedModelError  config.json asks for what is not implemented, or contradicts itself or the weights
"""


class ModelError(ValueError):
    """Base of the errors that a caller of `model` can cause."""


class ModelSettingsError(ModelError):
    """A field of `ModelSettings` or `ParallelLayout` is out of range, or two of them contradict each other."""


class UnsupportedModelError(ModelError):
    """config.json asks for what is not implemented, or contradicts itself or the weights."""
