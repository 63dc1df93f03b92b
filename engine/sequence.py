"""State of one unfinished request: its tokens, its pages, how much of it is computed. No policy, no torch."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engine.prefix_cache import root_key
from engine.types import EngineRequest, TokenLogprobs

if TYPE_CHECKING:
    from engine.grammar_matcher import GrammarMatcher

NO_PAGE = -1  # in `Sequence.sliding_pages`: given back
GREEDY_TEMPERATURE = 1e-5  # at or below it the best token is taken; dividing by less would overflow

LogitMask = Callable[[list[int]], np.ndarray | None]
"""Which tokens may come next, given the generated ones: bool [V], or None for all.

It is called once a token, after the host knows the token before it; the model may be computing meanwhile.
"""


class Sequence:
    """State of one request from admission to its last output.

    token_ids   [prompt ............ | output ......] promised ]
    KV written  [0 ...... num_computed)                the rest, `num_pending` tokens, is still to be fed
    pages       page i holds positions [i * page_size, (i + 1) * page_size)

    `sliding_pages` are the same for layers with a sliding window, where those have pages of their own (`paging`), else
    empty. The first `num_slid_pages` of them are given back.

    Steps overlap: the next one may be launched before the host knows the tokens of this one. A launched step counts as
    computed. `num_promised` tokens follow `token_ids`: launched steps choose them, but the host has not seen them yet.
    `num_in_flight` launched steps of this sequence are not collected yet.

    `path` (client, connection), `priority` and `arrival`, a number that grows with every request, decide whose turn it
    is.
    `row` is its line in the page table of the runner, -1 unless it runs; steps have told of `num_sent_pages` pages
    and `num_sent_sliding_pages` sliding ones.
    `added_s` and `started_s` are when the request was queued and first admitted, by the clock of the core.
    Its pages become findable as long as the prefix cache's epoch is its `cache_epoch`, that of its last admission.
    `grammar` is set, for a request that has one, before it is scheduled; it has accepted every generated token but a
    stop token, which ends the request.
    `sampler_state` belongs to the sampler and lives as long as the request.
    """

    __slots__ = (
        "added_s",
        "arrival",
        "cache_epoch",
        "grammar",
        "is_plain_greedy",
        "logit_mask",
        "max_fed",
        "num_cached",
        "num_computed",
        "num_in_flight",
        "num_promised",
        "num_prompt",
        "num_remembered_pages",
        "num_sent_pages",
        "num_sent_sliding_pages",
        "num_slid_pages",
        "page_keys",
        "pages",
        "path",
        "priority",
        "prompt_logprobs",
        "request_id",
        "root_key",
        "row",
        "sampler_state",
        "sampling",
        "seed",
        "sliding_pages",
        "started",
        "started_s",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self, request: EngineRequest, *, stop_ids: frozenset[int], seed: int, logit_mask: LogitMask | None = None
    ) -> None:
        sampling = request.sampling
        self.request_id = request.request_id
        self.path = (request.client, request.connection)
        self.arrival = 0
        self.priority = request.priority
        self.root_key = root_key(request.cache_salt)
        self.sampling = sampling
        self.stop_ids = stop_ids
        self.seed = seed
        self.token_ids = list(request.prompt_ids)
        self.num_prompt = len(request.prompt_ids)
        self.max_fed = self.num_prompt + sampling.max_tokens - 1  # the last token of an answer is never fed
        self.logit_mask = logit_mask
        self.grammar: GrammarMatcher | None = None
        self.num_computed = 0
        self.num_promised = 0
        self.num_in_flight = 0
        self.num_cached = 0
        self.started = False
        self.added_s = 0.0
        self.started_s = 0.0
        self.pages: list[int] = []
        self.sliding_pages: list[int] = []
        self.num_slid_pages = 0
        self.page_keys: list[bytes] = []
        self.num_remembered_pages = 0
        self.cache_epoch = 0
        self.row = -1
        self.num_sent_pages = 0
        self.num_sent_sliding_pages = 0
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.sampler_state: Any = None
        self.is_plain_greedy = (
            sampling.temperature <= GREEDY_TEMPERATURE
            and sampling.logprobs is None
            and sampling.min_tokens == 0
            and not sampling.logit_bias
            and logit_mask is None
            and request.grammar is None
            and not has_penalties(self)
        )

    @property
    def client(self) -> str:
        """Who asks."""
        return self.path[0]

    @property
    def num_output(self) -> int:
        """Generated tokens that the host knows."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens that are still to be fed, promised ones included; 1 in plain decoding."""
        return min(len(self.token_ids) + self.num_promised, self.max_fed) - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True until the first output has carried the prompt's log-probabilities."""
        return self.sampling.prompt_logprobs is not None and len(self.token_ids) == self.num_prompt


def has_penalties(seq: Sequence) -> bool:
    """True when tokens seen before change the logits."""
    sampling = seq.sampling
    return sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0 or sampling.repetition_penalty != 1.0


class Chunk(msgspec.Struct, frozen=True, eq=False):
    """Consecutive tokens of one sequence for one step, fixed when they are scheduled; `StepRow` says what they mean."""

    seq: Sequence
    row: int
    start: int
    num_tokens: int
    samples: bool
    num_logit_rows: int

    @classmethod
    def next_of(cls, seq: Sequence, num_tokens: int) -> "Chunk":
        """The next tokens of a running sequence; `num_tokens` is at least 1 and at most `seq.num_pending`."""
        start = seq.num_computed
        samples = start + num_tokens == len(seq.token_ids) + seq.num_promised
        scores_prompt = seq.wants_prompt_logprobs and not seq.num_promised
        return cls(seq, seq.row, start, num_tokens, samples, num_tokens if scores_prompt else int(samples))

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens
