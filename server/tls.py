"""What a client's failed connection has to do with TLS, with the way out. Serves nothing: `server.service` does."""

import os
import ssl

from server.errors import chain_of

HTTPS_HINT = "; if it serves HTTPS, give an address with https://"
_OTHER_HOST = (62, 64)  # OpenSSL's codes: the certificate has another host name, another IP address
_EXPIRED = 10


def tls_failure(error: BaseException) -> str | None:
    """The words for what a user can mend, which begin with "its" or "the"; None if TLS is not at fault.

    HTTP clients wrap the library's error, so the causes of `error` count too.
    """
    cause = next((each for each in chain_of(error) if isinstance(each, ssl.SSLError)), None)
    if cause is None:
        return None
    if not isinstance(cause, ssl.SSLCertVerificationError):
        return f"the TLS handshake failed ({cause}): if it serves plain HTTP, give an address with http://"
    if cause.verify_code in _OTHER_HOST:
        return f"its certificate is for another address ({cause.verify_message}): give the one that it names"
    if cause.verify_code == _EXPIRED:
        return "its certificate has expired: renew it"
    if given := os.environ.get("SSL_CERT_FILE"):
        return (
            f"its certificate is not trusted ({cause.verify_message}): {given}, which SSL_CERT_FILE names, has not the "
            "certificate of who signed it"
        )
    return (
        f"its certificate is not trusted ({cause.verify_message}): set the variable SSL_CERT_FILE to a file with the "
        "certificate of who signed it, which is the certificate itself if it is self-signed"
    )
