"""A connection to the service that the flags of a command describe, for commands that ask it something."""

import http.client

from server.listener import reachable


def connect(host: str, port: int, *, has_tls: bool, timeout_s: float) -> http.client.HTTPConnection:
    """To a service that listens on `host`. Ignores proxies that the environment names.

    The certificate is not checked: it names the service, not this machine's address.
    """
    if not has_tls:
        return http.client.HTTPConnection(reachable(host), port, timeout=timeout_s)
    import ssl  # most services have none

    unchecked = ssl.create_default_context()
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(reachable(host), port, timeout=timeout_s, context=unchecked)
