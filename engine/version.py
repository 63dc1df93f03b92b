"""The version of this service, as installed."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def service_version() -> str:
    """Version of the installed distribution; "unknown" when run from a checkout that was never installed.

    Read once: every answer names it, and an answer must not need a file to be opened.
    """
    try:
        return version("moe-serve")
    except PackageNotFoundError:
        return "unknown"
