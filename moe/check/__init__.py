"""Checks, while loading, that a layer's chosen path computes what plain torch computes."""
