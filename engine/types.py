"""Types exchanged between the HTTP process and the engine process. Token ids only; no text, no tensors."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from engine.grammar_spec import GrammarSpec

FinishReason = Literal["stop", "length", "abort", "error"]


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Reasoning of at most `num_tokens` tokens, all its parts together. `engine.thinking` ends it by force.

    Reasoning begins after the tokens `begin_ids`, or with the answer if `begins_inside`, and ends with any of
    `end_ids`. Once the budget is used, `close_ids` follow, and the token after them is not `barred_id`.
    """

    num_tokens: int
    begin_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    close_ids: tuple[int, ...]
    barred_id: int | None = None
    begins_inside: bool = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. `temperature` 0 is greedy. `top_k` 0 means all. Checked by `engine.validate`."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()  # beside the model's EOS ids
    ignore_eos: bool = False  # the model's EOS ids neither stop nor are forbidden
    logprobs: int | None = None  # None: none; N: the chosen token and the N best
    prompt_logprobs: int | None = None  # the same for every prompt token
    logprob_token_ids: tuple[int, ...] = ()  # with logprobs: the alternatives are these tokens, in this order
    thinking: ThinkingBudget | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to continue. `n` choices are `n` requests."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    grammar: GrammarSpec | None = None  # what the answer must look like; None: anything
    client: str = ""  # clients get equal turns, however many requests each sends
    connection: str = ""  # within a client, connections get equal turns
    priority: int = 0  # within a client, lower ones run first
    cache_salt: str = ""  # only requests with the same salt share cached pages


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probability of one token and the best alternatives, best first: (token id, logprob)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """News of one request: tokens since the last output; with `finish_reason` it is the last one.

    A stop token is included in `token_ids`. `stop_reason` is the stop id that ended it. The first output of a request
    that asked for prompt log-probabilities carries them: one entry per prompt token, the first None.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None  # safe to show to the client; set with finish_reason "error"
    error_param: str | None = None  # request field the error is about; a set one makes it the client's fault (400)
    overloaded: bool = False  # refused for want of room or not ready yet: the same request may work later (429, 503)
    num_cached_tokens: int = 0  # of the prompt; with the first output and the last one
    queue_s: float | None = None  # with the first token: seconds from the queue's entry to its exit
    prefill_s: float | None = None  # with the first token: seconds from then to this token


class CallOff(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """End requests wherever their clients are connected; it goes through the engine to all HTTP processes.

    `names` are those that clients know; None means all requests. With an `owner` only requests of that owner end.
    """

    names: list[str] | None
    owner: str | None


OrderKind = Literal["reset_prefix_cache", "start_profile", "stop_profile"]


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the step loop, published at least twice a second; its arrival is the heartbeat."""

    num_running: int
    num_waiting: int
    num_pages_used: int
    num_pages_total: int
    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_kernels_compiled_after_ready: int = 0  # filled in by the process, not by the step loop
    num_not_finite: int = 0  # requests that ended because their logits were not finite
    num_step_tokens: int = 0  # tokens that all steps computed, prompt and answer together
    step_sizes: list[int] = []  # steps by their tokens, in the buckets of `engine.step_sizes`


def sum_stats(stats: Iterable[EngineStats]) -> EngineStats:
    """The sums over ranks that schedule; at least one."""
    every = list(stats)
    names = (name for name in EngineStats.__struct_fields__ if name != "step_sizes")
    sums = {name: sum(getattr(each, name) for each in every) for name in names}
    return EngineStats(
        **sums, step_sizes=[sum(counts) for counts in zip(*(each.step_sizes for each in every), strict=True)]
    )


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that went to each expert since the start, all ranks together.

    `counts`: int64 [layers, experts], little-endian. `rank_ratios`: in each layer the tokens of the busiest
    expert-parallel rank over the mean, with the placement of now. `num_moves`: experts that have changed their place.
    """

    layers: list[int]  # the model's numbers of its MoE layers
    num_experts: int
    counts: bytes
    rank_ratios: list[float]
    num_moves: int = 0

    def rows(self) -> list[list[int]]:
        """Tokens by layer and expert."""
        numbers = memoryview(self.counts).cast("q").tolist()
        return [numbers[start : start + self.num_experts] for start in range(0, len(numbers), self.num_experts)]


class LayerCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A MoE layer that was compared with its reference while loading: the largest relative error of any expert."""

    layer: int
    path: str  # backend/transport/format
    worst_error: float
    tolerance: float


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Sent once when the engine is ready to serve. Pages, tokens and requests are of all ranks together."""

    max_model_len: int
    vocab_size: int
    page_size: int
    num_pages: int
    num_kv_tokens: int  # that fit into the KV cache; less than num_pages * page_size where sliding layers take pages
    max_requests: int  # running and queued together
    device: str
    dtype: str
    moe_paths: list[str]  # one line a MoE layer: "layer 3: torch / none / mxfp4"
    load_seconds: float
    selfcheck: list[LayerCheck] = []  # the layers that `--selfcheck` asked for
    weight_bytes: int = 0  # on the GPU as torch counts them; on a CPU by config.json and headers
    kv_cache_bytes: int = 0
