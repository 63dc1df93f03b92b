"""Shows the library's several tqdm bars of one download as one `Progress`."""

import threading
from typing import Any

from tqdm import tqdm

from loaders.progress import Progress


class QuietBar(tqdm):  # type: ignore[misc]
    """A bar that counts and shows nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "file": _Nowhere()})


def make_byte_counter(progress: Progress) -> type[QuietBar]:
    """A class for `tqdm_class` whose bars move `progress` by the bytes they count.

    Bytes received and bytes written are two bars; the one that is ahead counts.
    """
    lock = threading.Lock()
    shown = 0

    class ByteCounter(QuietBar):
        def update(self, n: float | None = 1) -> None:
            nonlocal shown
            with lock:  # files arrive in threads, and tqdm's own count is no atomic step
                super().update(n)
                if self.unit == "B" and self.n > shown:
                    progress.advance(int(self.n) - shown)
                    shown = int(self.n)

    return ByteCounter


class _Nowhere:
    """A file that drops everything."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        """Drop it."""
        return len(text)

    def flush(self) -> None:
        """Nothing is buffered."""
