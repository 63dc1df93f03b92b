"""aiter's fused experts (AMD)."""
