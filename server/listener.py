"""The listening socket: taken before anything is loaded, so that a port in use is known at once."""

import errno
import socket

from server.errors import SettingError, StartError


def bind(host: str, port: int) -> socket.socket:
    """The listening socket, taken before anything is loaded.

    Raises:
        SettingError: the host cannot be an address, or this user may not listen there.
        StartError: the port is in use, or no interface has the address, which may come later.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:  # UnicodeError: the text cannot be a host name
        reason = getattr(error, "strerror", None) or error
        raise SettingError(f"--host: '{host}' is not an address of this machine: {reason}") from error
    # With the protocol named, asyncio switches Nagle's algorithm off on connections; else small writes wait 40 ms.
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        reason = str(error.strerror or error).lower()
        way_out = "stop what uses it, or choose another --port"
        if error.errno == errno.EADDRNOTAVAIL:
            way_out = "choose another --host, or wait for the interface that has it"
        refusal = SettingError if error.errno in (errno.EACCES, errno.EPERM) else StartError
        raise refusal(f"--port: cannot listen on {host}:{port}: {reason}; {way_out}") from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket, *, has_tls: bool = False) -> str:
    """The address to give to a client on this machine."""
    host, port = listener.getsockname()[:2]
    host = reachable(host)
    return f"http{'s' * has_tls}://" + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def reachable(host: str) -> str:
    """The address that reaches a service listening on `host` from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
