"""Which client and connection a request counts for, when the engine shares its turns (`engine.fair_queue`)."""

import hashlib

from starlette.requests import Request

from server.config import ServerConfig
from server.keys import key_of


def asker_of(request: Request, config: ServerConfig) -> tuple[str, str]:
    """(client, connection) of a request.

    The client is the value of `client_header` if that is set and sent, else the address. Their keys tell clients of one
    address apart; if the service has no keys, what they send as a key does. Connections are not clients: HTTP/1.1 needs
    one for every request in flight, so whoever opens many would get many turns.
    """
    host, port = request.client or ("", 0)
    named = request.headers.get(config.client_header, "") if config.client_header else ""
    name = named.rpartition(",")[2].strip() or host  # of a list, the nearest proxy added the last entry
    return _digest(f"{_asking_key(request)}\n{name}"), f"{host}:{port}"  # a digest: the engine never sees a secret


def owner_of(request: Request) -> str:
    """Who owns what a request leaves behind: all requests with the same key are one owner's, and so are all without."""
    return _digest(key_of(request.headers))


def _asking_key(request: Request) -> str:
    """What tells keys apart: the number of a known key, else the headers that may carry one."""
    if request.state.key is not None:
        return f"key {request.state.key}"
    return "\n".join(request.headers.get(name, "") for name in ("authorization", "x-api-key"))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
