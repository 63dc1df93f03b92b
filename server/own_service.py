"""`OwnService`: the service that the flags of a command describe, for commands that ask it something."""

import http.client
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.config import ServerConfig
from server.errors import SettingError
from server.listener import reachable


@dataclass(frozen=True, slots=True)
class OwnService:
    """Where it listens, and whether it speaks HTTPS."""

    host: str
    port: int
    has_tls: bool

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "OwnService":
        """From settings by field name.

        Raises:
            SettingError: a text that can be no host, or port 0, which does not say where the service listens.
        """
        address = ServerConfig(**{name: values[name] for name in ("host", "port") if name in values})
        if address.port == 0:
            raise SettingError("--port: 0 lets the service pick a free port, which is not known here; name one")
        try:
            address.host.encode("idna")
        except UnicodeError as error:
            raise SettingError(f"--host: '{address.host}' is not an address: {error}") from error
        return cls(address.host, address.port, values.get("ssl_certfile") is not None)

    def get(self, path: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Status and body of an answer. Ignores proxies that the environment names.

        Raises:
            OSError, http.client.HTTPException: there is no answer.
        """
        connection = self._connect(timeout_s)
        try:
            connection.request("GET", path, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def no_answer(self, error: Exception) -> str:
        """The line for an error of `get`."""
        import ssl  # an answer needs it for HTTPS alone

        hint = ""
        if isinstance(error, http.client.RemoteDisconnected) and not self.has_tls:
            hint = "; if the service has a certificate, give --ssl-certfile or its variable here, too"
        elif isinstance(error, ssl.SSLError):
            hint = "; if the service has no certificate, leave out --ssl-certfile and its variable"
        return f"no answer from {self.host} port {self.port}: {error}{hint}"

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """The certificate is not checked: it names the service, not this machine's address."""
        if not self.has_tls:
            return http.client.HTTPConnection(reachable(self.host), self.port, timeout=timeout_s)
        import ssl  # most services have none

        unchecked = ssl.create_default_context()
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection(reachable(self.host), self.port, timeout=timeout_s, context=unchecked)
