"""Checkpoint folders with the names, shapes and dtypes of published models, sparse or random. Not for serving."""
