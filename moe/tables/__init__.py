"""Measured choices per GPU and shape, as JSON files. No code."""
