"""Wire models of orders (aborts, a reset of the prefix cache, profiles) and of the load that routers read."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema, model_validator
from typing_extensions import TypedDict

from server.schema.common import RequestModel, refusal

_MAX_IDS = 1024
_MAX_ID_CHARS = 256
_ID_SCHEMA = {"type": "string", "minLength": 1, "maxLength": _MAX_ID_CHARS}


def _ids(value: Any) -> list[str]:
    ids = [value] if isinstance(value, str) else value
    if not isinstance(ids, list) or not all(isinstance(each, str) and 0 < len(each) <= _MAX_ID_CHARS for each in ids):
        raise ValueError(f"must be the id of a request, of at most {_MAX_ID_CHARS} characters, or a list of ids")
    if not 0 < len(ids) <= _MAX_IDS:
        raise ValueError(f"holds {len(ids)} ids: between 1 and {_MAX_IDS} are accepted")
    return ids


_Ids = Annotated[
    list[str],
    BeforeValidator(_ids),
    WithJsonSchema(
        {"anyOf": [_ID_SCHEMA, {"type": "array", "items": _ID_SCHEMA, "minItems": 1, "maxItems": _MAX_IDS}]}
    ),
]


class AbortRequest(RequestModel):
    """Requests to end, by the names that SGLang uses. One of the two is needed."""

    rid: _Ids | None = None
    abort_all: bool | None = None

    @property
    def names(self) -> list[str] | None:
        """Those to end; None means all."""
        return None if self.abort_all else self.rid or []

    @model_validator(mode="after")
    def _says_which(self) -> "AbortRequest":
        if (self.rid is None) == (not self.abort_all):
            raise refusal("rid", "give the id of a request, or several, or else abort_all: true")
        return self


class OrderAnswer(TypedDict):
    """An order was carried out, or an abort has been passed on."""

    status: Literal["done", "accepted"]


class Load(TypedDict):
    """What the engine did a moment ago; zeros while it loads.

    `running` and `waiting` are requests in the engine, of `max_requests`; `kv_usage` is the part of the KV pages in
    use, from 0 to 1. `server_load` counts HTTP requests to generate that are being answered.
    """

    running: int
    waiting: int
    max_requests: int
    kv_usage: float
    kv_pages_used: int
    kv_pages: int
    server_load: int
