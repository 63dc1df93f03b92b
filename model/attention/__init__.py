"""Attention over the paged KV cache, one interface for every implementation."""
