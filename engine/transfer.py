"""Copies between host and device that do not wait for the device, so that the host can prepare the next step meanwhile.

On a GPU a plain `torch.tensor(list, device=...)` or `.tolist()` waits for everything launched before it. Pinned memory
does not need that. torch keeps a pinned block until the copies that use it are done.
"""

from collections.abc import Sequence

import numpy as np
import torch


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


class Mark:
    """A point in the device's work: everything launched before the mark was made. A CPU has passed it already."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    @property
    def is_passed(self) -> bool:
        """Whether `wait` would not block."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Block until the device has passed the mark. Errors of the device's work before it are raised here."""
        if self._event is not None:
            self._event.synchronize()
