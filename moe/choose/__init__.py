"""Chooses the backend of a path and explains the choice."""
