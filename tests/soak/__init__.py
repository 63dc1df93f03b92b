"""Soak test: unruly clients against the real service. `python -m tests.soak --seconds 600`, or `make soak`."""
