"""Plain torch: runs anywhere. Importing the package registers the backend and its permutes."""

from moe.backends.torch import backend, deepep

__all__ = ["backend", "deepep"]
