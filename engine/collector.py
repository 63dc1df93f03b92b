"""Python's garbage collector rests during imports: what they make stays, so walking it frees nothing."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def resting_collector() -> Iterator[None]:
    """Collect nothing meanwhile, and never walk afterwards what there is at the end."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
