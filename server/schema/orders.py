"""Wire models of orders (aborts, a reset of the prefix cache, profiles) and of the load that routers read."""

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import TypedDict

from server.schema.common import RequestModel, refusal

_Name = Annotated[str, Field(min_length=1, max_length=256)]


class AbortRequest(RequestModel):
    """Requests to end, by the names that SGLang uses. One of the two is needed."""

    rid: _Name | Annotated[list[_Name], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    abort_all: bool | None = None

    @property
    def names(self) -> list[str] | None:
        """Those to end; None means all."""
        if self.abort_all:
            return None
        return [self.rid] if isinstance(self.rid, str) else self.rid or []

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
