"""Measurements, each with its command, hardware and commit in `results/*.json`. Not part of the wheel."""
