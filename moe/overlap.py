"""Work that shares a GPU: streams beside the current one, and a down GEMM that tells the combine which rows are ready.

main stream   dispatch | gate-up GEMM | start event, down GEMM ........ | wait for both
side stream                           | combine: sends rows as signalled |
"""

import enum
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


class SignalKind(enum.StrEnum):
    """What a down GEMM signals. The kernels of both sides must agree."""

    EXPERTS = "experts"  # every processor adds one for each expert whose rows it has written
    TILES = "tiles"  # every tile of columns adds one for its tile of rows


@dataclass(slots=True)
class DownGemmOverlap:
    """Lets the second GEMM share the GPU with the combine that waits for it.

    The GEMM uses `num_sms` SMs and adds to `signals`, zeros at first. `start_event` is recorded right before it. Of
    tiles, it says how many rows each has (`block_m`) and at which count one is ready (`threshold`).
    """

    num_sms: int
    signals: torch.Tensor
    start_event: torch.cuda.Event | None = None
    block_m: int = 0
    threshold: int = 0

    def start(self) -> None:
        """The GEMM is the next kernel of the current stream."""
        if self.start_event is not None:
            self.start_event.record()


class SideStream:
    """A stream beside the current one of a GPU; on a CPU everything runs in the order of the calls."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def is_real(self) -> bool:
        """Whether work can run beside the current stream."""
        return self._stream is not None

    def event(self) -> torch.cuda.Event | None:
        """A mark to be recorded on the current stream; None on a CPU."""
        return None if self._stream is None else torch.cuda.Event()

    @contextmanager
    def after(self, event: torch.cuda.Event | None) -> Iterator[None]:
        """Launch what is inside on this stream, behind a recorded event; without one, behind all work so far."""
        if self._stream is None:
            yield
            return
        if event is None:
            self._stream.wait_stream(torch.cuda.current_stream())
        else:
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """The current stream waits for everything launched here."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def takes(function: Callable[..., object], *names: str) -> bool:
    """Whether a library's function has these arguments. Compiled ones have a signature in their text alone."""
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):
        text = function.__doc__ or ""
        return all(f"{name}:" in text for name in names)
    return all(name in known for name in names)
