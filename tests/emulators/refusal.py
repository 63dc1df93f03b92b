"""How an emulated kernel refuses: what a library asserts on the host, or would read or write out of bounds for."""


class KernelRefusal(RuntimeError):
    """A failed assertion of the library, or an access it would make out of bounds."""


def need(condition: bool, message: str) -> None:
    """Refuse unless `condition` holds."""
    if not condition:
        raise KernelRefusal(message)
