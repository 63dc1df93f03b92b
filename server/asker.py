"""Who asks: the client and the connection between which the engine shares its turns (`engine.fair_queue`)."""

import hashlib

from starlette.requests import Request

from server.config import ServerConfig


def asker_of(request: Request, config: ServerConfig) -> tuple[str, str]:
    """(client, connection) of a request.

    The client is the `client_header`'s value where that is set and sent, else the address. Where no key is asked for,
    the `Authorization` header tells clients of one address apart. A connection alone is no client: HTTP/1.1 needs one
    for every request in flight, so whoever opens many would get many turns.
    """
    host, port = request.client or ("", 0)
    named = request.headers.get(config.client_header, "") if config.client_header else ""
    name = named.rpartition(",")[2].strip() or host  # the last entry of a list is the one the nearest proxy added
    key = "" if config.api_key else request.headers.get("authorization", "")
    digest = hashlib.blake2b(f"{key}\n{name}".encode(), digest_size=8)  # a secret has no business in the engine
    return digest.hexdigest(), f"{host}:{port}"
