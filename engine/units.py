"""Sizes in words."""

MIB = 1 << 20
_UNITS = ("bytes", "KiB", "MiB", "GiB")


def size_text(num_bytes: float, digits: int = 1) -> str:
    """ "12.8 GiB", "3.4 MiB" or "512 bytes": in the largest unit up to GiB of which there is at least one."""
    power = 0
    while power < len(_UNITS) - 1 and num_bytes >= 1024 ** (power + 1):
        power += 1
    return f"{num_bytes / 1024**power:.{digits if power else 0}f} {_UNITS[power]}"
