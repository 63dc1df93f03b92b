"""The version of this service, as installed."""

from importlib.metadata import PackageNotFoundError, version


def service_version() -> str:
    """Version of the installed distribution; "unknown" when run from a checkout that was never installed."""
    try:
        return version("moe-serve")
    except PackageNotFoundError:
        return "unknown"
