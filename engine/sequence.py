"""One request on its way: its tokens so far, its pages, how far it is computed. No policy, no torch."""

from dataclasses import dataclass
from typing import Any

from engine.types import EngineRequest, TokenLogprobs

GREEDY_TEMPERATURE = 1e-5  # at or below it the best token is taken; dividing by less would overflow


class Sequence:
    """State of one request from admission to its last output.

    token_ids   [prompt ............ | output ......]
    KV written  [0 ...... num_computed)                the rest, `num_pending` tokens, is still to be fed
    pages       page i holds positions [i * page_size, (i + 1) * page_size)

    `path` (client, connection) and `arrival`, a number that grows with every request, decide whose turn it is.
    `row` is its line in the page table of the runner, -1 unless it runs; `num_table_pages` pages are copied there.
    `sampler_state` belongs to the sampler and lives as long as the request.
    """

    __slots__ = (
        "arrival",
        "is_plain_greedy",
        "num_cached",
        "num_computed",
        "num_prompt",
        "num_remembered_pages",
        "num_table_pages",
        "page_keys",
        "pages",
        "path",
        "prompt_logprobs",
        "request_id",
        "row",
        "sampler_state",
        "sampling",
        "seed",
        "started",
        "stop_ids",
        "token_ids",
    )

    def __init__(self, request: EngineRequest, *, stop_ids: frozenset[int], seed: int) -> None:
        sampling = request.sampling
        self.request_id = request.request_id
        self.path = (request.client, request.connection)
        self.arrival = 0
        self.sampling = sampling
        self.stop_ids = stop_ids
        self.seed = seed
        self.token_ids = list(request.prompt_ids)
        self.num_prompt = len(request.prompt_ids)
        self.num_computed = 0
        self.num_cached = 0
        self.started = False
        self.pages: list[int] = []
        self.page_keys: list[bytes] = []
        self.num_remembered_pages = 0
        self.row = -1
        self.num_table_pages = 0
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.sampler_state: Any = None
        self.is_plain_greedy = (
            sampling.temperature <= GREEDY_TEMPERATURE
            and sampling.logprobs is None
            and sampling.min_tokens == 0
            and not sampling.logit_bias
            and not has_penalties(self)
        )

    @property
    def client(self) -> str:
        """Who asks."""
        return self.path[0]

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens whose keys are not written yet; 1 in plain decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True until the first output has carried the prompt's log-probabilities."""
        return self.sampling.prompt_logprobs is not None and len(self.token_ids) == self.num_prompt


def has_penalties(seq: Sequence) -> bool:
    """True when tokens seen before change the logits."""
    sampling = seq.sampling
    return sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0 or sampling.repetition_penalty != 1.0


@dataclass(slots=True)
class Chunk:
    """Consecutive tokens of one sequence for one step: positions [start, start + num_tokens)."""

    seq: Sequence
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """True when the step ends with a new token for this sequence."""
        return self.start + self.num_tokens == len(self.seq.token_ids)
