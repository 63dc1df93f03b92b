"""Structured outputs: what an answer must look like, from the fields of a request to a constraint of the engine."""
