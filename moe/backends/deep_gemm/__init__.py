"""DeepGEMM's grouped FP8 GEMMs. Importing the package registers the backend and its permutes."""

from moe.backends.deep_gemm import backend, permutes

__all__ = ["backend", "permutes"]
