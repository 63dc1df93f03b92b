"""Finds the variables that Kubernetes sets for a Service whose name begins with `moe-serve`: they are not settings.

For every Service of its namespace a pod gets `<NAME>_SERVICE_HOST`, `<NAME>_SERVICE_PORT`, the same with the name of a
port, and Docker's link variables: `<NAME>_PORT=tcp://10.96.0.12:8000`, `<NAME>_PORT_8000_TCP` and the parts of the
latter. For a Service called moe-serve, `MOE_SERVE_PORT` looks like the setting `--port`; its value tells them apart.
"""

import re
from collections.abc import Mapping

_LINK = r"(tcp|udp|sctp)://.*"
_PATTERNS = [
    (re.compile(name), re.compile(value, re.IGNORECASE))
    for name, value in (
        (r"MOE_SERVE_(\w+_)?SERVICE_HOST", r".*"),
        (r"MOE_SERVE_(\w+_)?SERVICE_PORT(_\w+)?", r"\d+"),
        (r"MOE_SERVE_(\w+_)?PORT(_\d+_(TCP|UDP|SCTP))?", _LINK),
        (r"MOE_SERVE_(\w+_)?PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)", r".*"),
    )
]


def service_links(environ: Mapping[str, str]) -> list[str]:
    """Names of the variables that describe Services, sorted."""
    return sorted(
        variable
        for variable, text in environ.items()
        if any(name.fullmatch(variable) and value.fullmatch(text) for name, value in _PATTERNS)
    )
