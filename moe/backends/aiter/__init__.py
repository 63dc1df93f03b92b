"""aiter's fused experts (AMD). Importing the package registers the backend and its permutes."""

from moe.backends.aiter import backend, permutes

__all__ = ["backend", "permutes"]
