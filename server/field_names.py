"""`renamed_fields`: errors about a chat request, in the field names of the endpoint that was asked."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from server.errors import BadRequest

Renames = Sequence[tuple[re.Pattern[str], str]]
"""Patterns of chat's field names, and what to write instead; all of them are tried, in order."""


@contextmanager
def renamed_fields(renames: Renames) -> Iterator[None]:
    """Errors raised inside name the fields of another API instead of chat's."""
    try:
        yield
    except BadRequest as error:
        if error.param is not None:
            param = error.param
            for pattern, name in renames:
                param = pattern.sub(name, param)
            error.message = error.message.replace(error.param, param, 1)
            error.param = param
        raise
