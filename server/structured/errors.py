"""`SchemaError`: a part of a request's schema that answers cannot be bound to. Converted to a 400 by the caller."""


class SchemaError(ValueError):
    """`path` leads from the schema's root to the part, as in `properties.x.pattern`; it is empty for the root."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path = path
        self.reason = reason


class PatternError(ValueError):
    """A regular expression that cannot be honoured; the text says where and why."""


class Unsatisfiable(ValueError):
    """No value at all fits; the text says why."""
