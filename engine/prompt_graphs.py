"""`PromptGraphs`: captured steps that read short prompts, alone or beside requests that decode.

A forward pass of few tokens takes a GPU less time than a host needs to launch its kernels one by one. Above
`largest_prompt_step` the launches hide behind the device's work. Where ranks divide that work, each of them has less of
it and launches collectives too: two H200 took 46 ms for 1,200 tokens of GPT-OSS-20B launched one by one, and 14 ms for
1,024 in a graph.

A size is a number of tokens and of rows. The tokens that a step lacks become one more request, which reads and writes
the spare page; the rows that it lacks have no tokens.

Data-parallel ranks gather their tokens in every layer, padded to one number. So they all pad a step to the tokens of
the size that holds the largest of any rank (`agreed_tokens`), also a rank whose rows fit no graph, or without tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from engine.cuda_graphs import CapturedStep, GraphSettings, capture_all
from model.batch import ForwardBatch

if TYPE_CHECKING:
    from engine.config import EngineConfig

_TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024)
_RANK_TOKENS = (1280, 1536, 1792, 2048, 2560, 3072, 4096)  # where there are several ranks
_ROWS = (8, 64)


def largest_prompt_step(config: "EngineConfig") -> int:
    """Tokens of the largest step with prompts that is captured where decode steps are; 0 if the settings allow none.

    The engine's largest step and its context may be smaller.
    """
    if config.enforce_eager or config.moe_a2a_backend != "none":
        return 0
    return _TOKENS[-1] if config.num_ranks == 1 else _RANK_TOKENS[-1]


class PromptSize(NamedTuple):
    """Tokens of a step, and rows: one more than requests at most, for the padding."""

    num_tokens: int
    num_rows: int

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens of {self.num_rows - 1} requests"


def prompt_sizes(max_num_seqs: int, max_tokens: int) -> list[PromptSize]:
    """Sizes to capture for steps of up to `max_tokens` tokens: for each number of tokens every useful one of rows."""
    rows = [count for count in _ROWS if count < max_num_seqs + 1] + [max_num_seqs + 1]
    sizes = []
    for num_tokens in (count for count in (*_TOKENS, *_RANK_TOKENS) if count <= max_tokens):
        useful = [count for count, before in zip(rows, (0, *rows), strict=False) if before < num_tokens]
        if num_tokens > _TOKENS[-1]:
            useful = useful[-2:]  # padded rows cost little beside so many tokens
        sizes += [PromptSize(num_tokens, min(count, num_tokens - 1)) for count in useful]
    return sizes


class PromptGraphs:
    """Steps in which some request has more than one token."""

    def __init__(self, settings: GraphSettings, *, max_tokens: int) -> None:
        """`max_tokens` is what `largest_prompt_step` says, or less if steps have no more."""
        self._settings = settings
        self.sizes = prompt_sizes(settings.max_num_seqs, min(max_tokens, settings.max_model_len))
        num_tokens = max((size.num_tokens for size in self.sizes), default=1)
        most_rows, device = settings.max_num_seqs + 1, settings.model.device
        self.buffers = settings.buffers(num_tokens, most_rows)
        self._starts_B1 = torch.zeros(most_rows + 1, dtype=torch.int32, device=device)
        self._logit_rows_R = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self._graphs: dict[PromptSize, CapturedStep] = {}
        self._pool: torch.cuda._POOL_HANDLE | None = None

    @torch.inference_mode()
    def capture(self, pool: "torch.cuda._POOL_HANDLE | None", advance: Callable[[], None] = lambda: None) -> None:
        """Capture every size, in the memory of other graphs, which never run at the same time. See `capture_all`."""
        self._pool = pool
        if self.sizes:
            capture_all("steps with prompts", self.sizes, self._capture, advance)
        self.buffers.lens_M[0] = 1

    @torch.inference_mode()
    def run_sizes(self) -> None:
        """Run the steps that `capture` captures, without graphs."""
        for size in reversed(self.sizes):
            self._settings.run(self._first_batch(size))

    def _capture(self, size: PromptSize) -> CapturedStep:
        step = self._graphs[size] = self._settings.capture(self._first_batch(size), self._pool)
        return step

    def _first_batch(self, size: PromptSize) -> ForwardBatch:
        """A step in which the first row has all tokens."""
        self._starts_B1[1 : size.num_rows + 1] = size.num_tokens
        self.buffers.lens_M[0] = size.num_tokens
        return replace(self.batch(size), max_rank_tokens=size.num_tokens)  # else the ranks would ask each other

    def batch(self, size: PromptSize) -> ForwardBatch:
        """The buffers as a step of this size. The host's query lengths only say that there are prompts and decodes."""
        query_lens = (size.num_tokens - size.num_rows + 1, *(1,) * (size.num_rows - 1))
        return self.buffers.batch(
            query_lens, query_start_B1=self._starts_B1, logit_rows_R=self._logit_rows_R, all_ranks_decode=False
        )

    def agreed_tokens(self, max_rank_tokens: int) -> int:
        """Tokens to which all ranks pad a step that no decode graph serves, where the largest has `max_rank_tokens`."""
        return next((size.num_tokens for size in self.sizes if size.num_tokens >= max_rank_tokens), max_rank_tokens)

    def size_for(self, batch: ForwardBatch) -> PromptSize | None:
        """The smallest size that holds the step and a row of padding; None if there is none.

        Where ranks agreed on `max_rank_tokens`, which then are `agreed_tokens`, the size has exactly these.
        """
        most_rows = max(len(batch.query_lens) + 1, batch.logit_rows_R.shape[0])
        agreed = batch.max_rank_tokens
        fitting = (
            size
            for size in self.sizes
            if size.num_rows >= most_rows
            and (size.num_tokens >= batch.num_tokens if agreed is None else size.num_tokens == agreed)
        )
        return min(fitting, default=None)

    def run(self, batch: ForwardBatch, size: PromptSize) -> torch.Tensor:
        """fp32 logits [R, V] of a step, by the graph of `size_for`; the next replay overwrites them."""
        num_rows, num_logits = len(batch.query_lens), batch.logit_rows_R.shape[0]
        self.buffers.fill(batch)
        self._starts_B1[: num_rows + 1].copy_(batch.query_start_B1)
        self._logit_rows_R[:num_logits].copy_(batch.logit_rows_R)
        self._logit_rows_R[num_logits : size.num_rows] = 0
        self._replay(size, batch.query_lens, batch.seq_lens)
        return self._settings.logits_MV[:num_logits]

    def run_idle(self, num_tokens: int) -> bool:
        """Take part in a step for which the ranks have agreed on so many tokens, with padding alone.

        False if no graph has exactly these.
        """
        size = min((size for size in self.sizes if size.num_tokens == num_tokens), default=None)
        if size is None:
            return False
        self.buffers.clear()
        self._logit_rows_R[: size.num_rows] = 0
        self._replay(size, (), ())
        return True

    def _replay(self, size: PromptSize, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> None:
        """Run a graph for these rows, which the buffers hold, with the row of padding after them."""
        num_rows, num_idle = len(query_lens), size.num_tokens - sum(query_lens)
        self.buffers.lens_M[num_rows] = max(1, num_idle)
        self.buffers.num_live_rows = num_rows + 1
        self._starts_B1[num_rows + 1 : size.num_rows + 1] = size.num_tokens
        self._settings.model.prepare_replay()
        no_rows = size.num_rows - num_rows - 1
        self._graphs[size].replay(
            (*query_lens, num_idle, *(0,) * no_rows), (*seq_lens, max(1, num_idle), *(1,) * no_rows)
        )
