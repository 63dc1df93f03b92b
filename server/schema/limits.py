"""How many entries the lists and objects of a request may have, and how deep they nest.

Generous for real use; docs/api.md lists them.

Validation of a list stops at its first bad entry (`fail_fast`), and no object may have more keys than `MAX_KEYS`. So
even the worst body costs little more than reading it, and an error never lists thousands of others.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Annotated, Any, TypeVar

from pydantic import Field

Entry = TypeVar("Entry")

MAX_CONTAINERS = 100_000
"""Lists and objects in one body, nested ones included."""

MAX_NESTING = 200
"""Lists and objects inside each other. orjson writes 254 levels, and an answer may hold parts of its request."""

MAX_KEYS = 256
"""Keys of an object with a fixed set of fields, unknown ones included."""

MAX_MESSAGES = 10_000
MAX_PARTS = 4096
MAX_TOOL_CALLS = 1024
MAX_TOOLS = 512
MAX_PROPERTIES = 4096
MAX_BIASES = 4096
MAX_MODALITIES = 8
MAX_CHOICE_TEXTS = 1024

Messages = Annotated[list[Entry], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
ToolCalls = Annotated[list[Entry], Field(fail_fast=True, max_length=MAX_TOOL_CALLS)]
Tools = Annotated[list[Entry], Field(fail_fast=True, max_length=MAX_TOOLS)]
Modalities = Annotated[list[Entry], Field(fail_fast=True, max_length=MAX_MODALITIES)]
FreeObject = Annotated[dict[str, Any], Field(max_length=MAX_PROPERTIES)]
"""An object whose keys this service does not know, such as a tool's parameters."""


def is_too_deep(value: Any) -> bool:
    """Whether lists and objects of a JSON value are nested more than `MAX_NESTING` deep."""
    level: Iterable[Any] = (value,)
    for _ in range(MAX_NESTING + 1):
        containers = [each for each in level if type(each) is dict or type(each) is list]
        if not containers:
            return False
        level = chain.from_iterable(each.values() if type(each) is dict else each for each in containers)
    return True
