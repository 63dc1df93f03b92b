"""Errors of the load generator, as a tree.

Exception
├── BenchError           the run cannot start or go on; the message says what to change
└── RequestFailed        one request has failed; `kind` groups failures in the report
    └── BadResponse      the server's bytes are not HTTP, or its events not what the API says
"""


class BenchError(Exception):
    """The run cannot start or go on."""


class RequestFailed(Exception):
    """One request has failed."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class BadResponse(RequestFailed):
    """The server's bytes are not HTTP, or its events not what the API says."""

    def __init__(self, detail: str) -> None:
        super().__init__("bad response", detail)
