"""Copies between host and device that do not wait for the device, so that the host can prepare the next step meanwhile.

On a GPU a plain `torch.tensor(list, device=...)` or `.tolist()` waits for everything launched before it. Pinned memory
does not need that. torch keeps a pinned block until the copies that use it are done.
"""

from collections.abc import Sequence

import numpy as np
import torch

_NUM_BUFFERS = 4  # of `HostBuffers` and `HostResults`


def to_device(numbers: Sequence[object] | np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The numbers as a tensor on the device. An array must have the type already; on a CPU it is shared, not copied."""
    tensor = torch.from_numpy(numbers) if isinstance(numbers, np.ndarray) else torch.tensor(numbers, dtype=dtype)
    if device.type == "cpu" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory, to be read after the device has passed a `Mark` made later."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for the tensor's numbers, pinned if they are on a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class Mark:
    """A point in the work of the device's current stream: everything launched before. A CPU has passed it already."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = torch.cuda.Event() if device.type == "cuda" else None
        self.renew()

    def renew(self) -> None:
        """Move the mark to this moment, without allocating anything. Whoever waits for it may wait longer then."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def let_device_wait(self) -> None:
        """What is launched on the current stream from now on begins after the mark. The host does not wait."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    @property
    def is_passed(self) -> bool:
        """Whether `wait` would not block."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Block until the device has passed the mark. Errors of the device's work before it are raised here."""
        if self._event is not None:
            self._event.synchronize()


class HostBuffers:
    """Pinned memory from which arrays go to one tensor on the device, without a wait for the copies before.

    Cheaper than `to_device`: nothing is allocated. `_NUM_BUFFERS` take turns.
    """

    def __init__(self, target_N: torch.Tensor) -> None:
        """`target_N`: the contiguous tensor that all copies go to. Nothing else may write to it."""
        self._target_N, self._turn = target_N, 0
        self._buffers = [_on_host(target_N) for _ in range(_NUM_BUFFERS)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._events = [torch.cuda.Event() for _ in self._buffers] if target_N.is_cuda else []
        self._sent = b""  # the target begins with these bytes

    def take(self) -> np.ndarray:
        """The next buffer, to be filled from its start. Waits until the copy that it was filled for is over."""
        self._turn = (self._turn + 1) % len(self._buffers)
        if self._events:
            self._events[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self, num: int) -> None:
        """Copy the first `num` numbers of the buffer that was taken last."""
        self._sent = b""
        self._target_N[:num].copy_(self._buffers[self._turn][:num], non_blocking=True)
        if self._events:
            self._events[self._turn].record()

    def send_changed(self, num: int) -> None:
        """The same, but nothing is copied if these are the numbers that the call before sent: the target has them."""
        numbers = self._arrays[self._turn][:num].tobytes()
        if numbers != self._sent:
            self.send(num)
            self._sent = numbers


class HostResults:
    """Pinned memory to which numbers of one tensor on the device come, without a wait for it.

    The copies run on a stream of their own, so that what is launched after them need not wait for them.
    `_NUM_BUFFERS` take turns: a result must be read before as many others are fetched.
    """

    def __init__(self, source_N: torch.Tensor) -> None:
        """`source_N`: where all copies come from."""
        self._source_N, self._turn = source_N, 0
        self._buffers = [_on_host(source_N) for _ in range(_NUM_BUFFERS)]
        self._stream = torch.cuda.Stream(source_N.device) if source_N.is_cuda else None
        self._filled_mark = Mark(source_N.device)
        self._copy_marks = [Mark(source_N.device) for _ in self._buffers]

    def fetch(self, num: int) -> tuple[torch.Tensor, Mark]:
        """The first `num` numbers, to be read after the device has passed the mark.

        Then it has also done everything that was launched before on the current stream.
        """
        self._turn = (self._turn + 1) % len(self._buffers)
        source, host = self._source_N[:num], self._buffers[self._turn][:num]
        mark = self._copy_marks[self._turn]
        if self._stream is None:
            return host.copy_(source), mark
        self._filled_mark.renew()
        with torch.cuda.stream(self._stream):
            self._filled_mark.let_device_wait()
            host.copy_(source, non_blocking=True)
            mark.renew()
        return host, mark

    def before_overwrite(self) -> None:
        """Call before something is launched that writes to the source: the device then does all copies first."""
        self._copy_marks[self._turn].let_device_wait()
