"""`SampleGraphs`: CUDA graphs of the sampling kernels, for steps in which no row has logits to edit or to report.

That is most steps: all rows are greedy, or drawn with or without filters. One launch from the host then takes the place
of four, which cost it about as much time as the GPU needs for a layer.

Shape letters: R rows that sample, N rows of a graph, M of the largest one, V vocabulary.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from engine.cuda_graphs import capture_all
from engine.gpu_params import NUM_FLOATS, NUM_INTS, Rows
from engine.sampler import PendingTokens
from engine.transfer import HostBuffers, HostResults

_WORDS_OF_ROW = NUM_INTS + NUM_FLOATS + 1
_NO_ROW = -1
_PADDING = (0, -1, 0, -1, 0, 0, 0, 0, 0, 0)  # a greedy row whose token nobody keeps; columns as in `gpu_params`


class Replayable(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Launch it."""


class SampleGraphs:
    """Graphs for several numbers of rows, each once with draws and once without."""

    def __init__(self, logits_MV: torch.Tensor, sizes: Sequence[int], choose: Callable[[Rows], None]) -> None:
        """`logits_MV`: fp32, where steps leave their logits. `sizes` ascend. `choose` launches the kernels."""
        most, device = sizes[-1], logits_MV.device
        self._logits_MV, self._sizes, self._choose = logits_MV, list(sizes), choose
        self._words = torch.zeros(most * _WORDS_OF_ROW, dtype=torch.int64, device=device)
        self._host = HostBuffers(self._words)
        self._tokens_M = torch.zeros(most, dtype=torch.int64, device=device)
        self._results = HostResults(self._tokens_M)
        self._graphs: dict[tuple[int, bool], Replayable] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all graphs; see `capture_all`. The kernels must have been launched before."""
        capture_all("the choice of tokens", self._sizes, self._capture_size)

    def _capture_size(self, size: int) -> None:
        for has_draws in (False, True):
            self._graphs[size, has_draws] = _capture(self._rows(size, has_draws), self._choose)

    def _rows(self, size: int, has_draws: bool) -> Rows:
        ints, floats, drawn_N = self._words[: size * _WORDS_OF_ROW].split([size * NUM_INTS, size * NUM_FLOATS, size])
        return Rows(self._logits_MV, ints, floats, drawn_N if has_draws else drawn_N[:0], self._tokens_M[:size])

    def serves(self, logits_LV: torch.Tensor, num_rows: int) -> bool:
        """Whether these are the logits that the graphs read, and there is a graph for so many rows."""
        return logits_LV.data_ptr() == self._logits_MV.data_ptr() and num_rows <= self._sizes[-1]

    def launch(self, ints_RI: np.ndarray, floats_RF: np.ndarray, drawn: list[int]) -> PendingTokens:
        """Choose the tokens of R rows, of which `drawn` are drawn; see `gpu_params` for the columns."""
        num_rows = len(ints_RI)
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        words = self._host.take()
        first_float, first_drawn, end = size * NUM_INTS, size * (NUM_INTS + NUM_FLOATS), size * _WORDS_OF_ROW
        ints_NI = words[:first_float].reshape(size, NUM_INTS)
        ints_NI[:num_rows], ints_NI[num_rows:] = ints_RI, _PADDING
        floats_NF = words[first_float:first_drawn].view(np.float64).reshape(size, NUM_FLOATS)
        floats_NF[:num_rows], floats_NF[num_rows:] = floats_RF, 1.0
        words[first_drawn:end] = _NO_ROW
        words[first_drawn : first_drawn + len(drawn)] = drawn
        self._host.send_changed(end)  # greedy rows are the same in every step
        self._results.before_overwrite()
        self._graphs[size, bool(drawn)].replay()
        host_tokens_R, mark = self._results.fetch(num_rows)
        return PendingTokens(self._tokens_M[:num_rows], host_tokens_R, [None] * num_rows, None, copy_mark=mark)


def _capture(rows: Rows, choose: Callable[[Rows], None]) -> Replayable:
    """`torch.cuda.graph` would also collect garbage and empty the cache, which takes longer than all the rest."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            choose(rows)
        finally:
            graph.capture_end()
    return graph
