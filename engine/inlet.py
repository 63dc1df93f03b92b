"""`Inlet`: where the outputs of one request come in. A link puts them in; a reader keeps or takes them."""

from collections.abc import Callable
from typing import Protocol

from engine.types import EngineOutput


class Taker(Protocol):
    """Deals with outputs as they come, without waking a task. Both return False, and do nothing, to have one kept."""

    def take(self, output: EngineOutput) -> bool:
        """Any output."""

    def take_token(self, token_id: int, now_s: float) -> bool:
        """An output that is one more token and nothing else; it came at this time of the monotonic clock."""


class Inlet:
    """Belongs to one request and one reader. `keep` gets the outputs in order; it must not raise.

    Attributes:
        taker: asked first while it is set. `fail` gets its errors.
        has_begun: the request has had an output. For the link, as is `abort_sent`.
    """

    __slots__ = ("_fail", "_keep", "abort_sent", "has_begun", "taker")

    def __init__(self, keep: Callable[[EngineOutput], None], fail: Callable[[Exception], None] | None = None) -> None:
        """`fail` is needed only for a taker."""
        self._keep = keep
        self._fail = fail
        self.taker: Taker | None = None
        self.has_begun = False
        self.abort_sent = False

    def put(self, output: EngineOutput) -> None:
        """Hand an output to the reader."""
        try:
            if self.taker is not None and self.taker.take(output):
                return
        except Exception as error:
            self._on_error(error)
        else:
            self._keep(output)

    def put_token(self, request_id: str, token_id: int, now_s: float) -> None:
        """Hand over a token, as `Taker.take_token` describes it. The same as `put`, in less time."""
        try:
            if self.taker is not None and self.taker.take_token(token_id, now_s):
                return
        except Exception as error:
            self._on_error(error)
        else:
            self.put(EngineOutput(request_id=request_id, token_ids=[token_id]))

    def _on_error(self, error: Exception) -> None:
        if self._fail is None:
            raise error
        self._fail(error)
