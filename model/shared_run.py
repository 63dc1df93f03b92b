"""`SharedRun`: the shared experts of a layer in one step, beside the routed ones where there is a second stream."""

import torch

from model.linear import GatedMlp
from moe.overlap import SideStream


class SharedRun:
    """Starts when made, before the tokens are sent. An error waits for `need_success`: by then the tokens of the other
    ranks are here, which must not wait for this one.
    """

    def __init__(self, experts: GatedMlp | None, x_TH: torch.Tensor, side: SideStream | None) -> None:
        """Without `side` the shared experts run in `need_success`."""
        self._experts, self._x_TH, self._side = experts, x_TH, side
        self._out_TH: torch.Tensor | None = None
        self._error: Exception | None = None
        if side is not None and experts is not None:
            try:
                with side.after(None):
                    self._out_TH = experts(x_TH)
            except Exception as error:
                self._error = error

    def need_success(self) -> None:
        """Raise the error of the shared experts, if there was one."""
        if self._error is not None:
            raise self._error
        if self._experts is not None and self._side is None:
            self._out_TH = self._experts(self._x_TH)

    def abandon(self) -> None:
        """Nobody takes the result: work after this one waits for the second stream all the same."""
        if self._side is not None:
            self._side.join()

    def take(self) -> torch.Tensor | None:
        """[T, H] to be read on the current stream; None without shared experts."""
        if self._side is not None and self._out_TH is not None:
            self._side.join()
        return self._out_TH
