"""Errors of the loaders, as a tree. Every message names the file, the tensor or key where there is one, and what to do.

ValueError
└── LoadError                base of everything that can be wrong with a model folder
    ├── CheckpointError      files and tensors: missing, left over, truncated, wrong shape or dtype, half a scale set
    ├── ModelConfigError     config.json and its companions: a key that is missing or has the wrong type
    └── TokenizerError       tokenizer files that are missing or of an unsupported kind
"""


class LoadError(ValueError):
    """Base of everything that can be wrong with a model folder."""


class CheckpointError(LoadError):
    """A checkpoint file or tensor is missing, left over, damaged, or not what its format demands."""


class ModelConfigError(LoadError):
    """config.json, generation_config.json or hf_quant_config.json lacks a key or holds a wrong value."""


class TokenizerError(LoadError):
    """Tokenizer files are missing or of a kind that is not supported."""
