"""Measures the tactics of a layer while loading and keeps the results."""
