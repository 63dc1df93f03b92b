"""Is a request within its ranges, its vocabulary and its room? Errors name the field. No torch: both processes ask."""

import math
from dataclasses import dataclass

from engine.errors import CompilerFailure, RequestError
from engine.types import EngineOutput, EngineRequest, SamplingParams

MAX_LOGPROBS = 100
MAX_LOGPROB_IDS = 128
_INT64 = 2**63

# field -> (lowest, highest, lowest itself is allowed)
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 100.0, True),
    "top_p": (0.0, 1.0, False),
    "top_k": (0, 2**31 - 1, True),
    "min_p": (0.0, 1.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (0.01, 10.0, True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """What one engine can take: `vocab_size` ids, `max_model_len` tokens a request, `num_kv_tokens` tokens in the KV
    cache of one data-parallel rank, and grammars of `max_grammar_bytes`.
    """

    vocab_size: int
    max_model_len: int
    num_kv_tokens: int
    max_grammar_bytes: int = 2**20


def check_request(request: EngineRequest, limits: RequestLimits) -> None:
    """Raise `RequestError` if the request can never be served as it stands."""
    _check_ranges(request.sampling)
    _check_ids(request, limits.vocab_size)
    _check_room(request, limits)
    _check_grammar(request, limits.max_grammar_bytes)


def refusal_output(request_id: str, error: RequestError | CompilerFailure) -> EngineOutput:
    """The only output of a request that breaks a rule, or whose grammar we failed to compile."""
    param = error.param if isinstance(error, RequestError) else None
    return EngineOutput(request_id=request_id, finish_reason="error", error=str(error), error_param=param)


def overloaded_output(request_id: str, max_requests: int) -> EngineOutput:
    """The only output of a request that came while `max_requests` others were running or queued."""
    return EngineOutput(
        request_id=request_id,
        finish_reason="error",
        error=f"the queue is full: {max_requests} requests are running or waiting; try again later",
        overloaded=True,
    )


def _check_ranges(sampling: SamplingParams) -> None:
    if sampling.max_tokens < 1:
        raise RequestError("max_tokens", f"max_tokens is {sampling.max_tokens}: it must be at least 1")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise RequestError(
            "min_tokens",
            f"min_tokens is {sampling.min_tokens}: it must lie between 0 and max_tokens, which is "
            f"{sampling.max_tokens}: lower it, or give a larger max_tokens",
        )
    for field, (low, high, low_allowed) in _RANGES.items():
        value = getattr(sampling, field)
        if not (low <= value <= high) or (value == low and not low_allowed):  # a NaN fails the first test
            above = "at least" if low_allowed else "above"
            raise RequestError(field, f"{field} is {value}: it must be {above} {low} and at most {high}")
    if sampling.seed is not None and not -_INT64 <= sampling.seed < _INT64:
        raise RequestError("seed", f"seed is {sampling.seed}: it must fit in 64 bits")
    for field in ("logprobs", "prompt_logprobs"):
        count = getattr(sampling, field)
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise RequestError(field, f"{field} is {count}: it must lie between 0 and {MAX_LOGPROBS}")
    for token_id, bias in sampling.logit_bias.items():
        if not math.isfinite(bias) or abs(bias) > 100:
            raise RequestError("logit_bias", f"logit_bias of token {token_id} is {bias}: it must lie within ±100")
    if sampling.logprob_token_ids and sampling.logprobs is None:
        raise RequestError("logprob_token_ids", "logprob_token_ids needs logprobs: ask for those, too")
    if len(sampling.logprob_token_ids) > MAX_LOGPROB_IDS:
        raise RequestError("logprob_token_ids", f"logprob_token_ids holds more than {MAX_LOGPROB_IDS} token ids")


def _check_ids(request: EngineRequest, vocab_size: int) -> None:
    if not request.prompt_ids:
        raise RequestError("prompt", "the prompt is empty: it must have at least one token")
    for field, ids in (
        ("prompt", request.prompt_ids),
        ("logit_bias", request.sampling.logit_bias),
        ("stop_token_ids", request.sampling.stop_token_ids),
        ("logprob_token_ids", request.sampling.logprob_token_ids),
    ):
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            bad = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
            raise RequestError(field, f"{field} holds token id {bad}: this model has ids 0 to {vocab_size - 1}")


def _check_room(request: EngineRequest, limits: RequestLimits) -> None:
    num_prompt, max_tokens = len(request.prompt_ids), request.sampling.max_tokens
    if num_prompt >= limits.max_model_len:
        raise RequestError(
            "prompt",
            f"the prompt has {num_prompt} tokens and the context of this model is {limits.max_model_len} tokens, "
            "answer included: shorten the prompt",
        )
    if num_prompt + max_tokens > limits.max_model_len:
        raise RequestError(
            "max_tokens",
            f"max_tokens is {max_tokens} and the prompt has {num_prompt} tokens, together {num_prompt + max_tokens}: "
            f"the context of this model is {limits.max_model_len} tokens; "
            f"ask for at most {limits.max_model_len - num_prompt}",
        )
    num_kept = num_prompt + max_tokens - 1  # the last token is never fed back
    if num_kept > limits.num_kv_tokens:
        raise RequestError(
            "max_tokens",
            f"the request needs room for {num_kept} tokens and the KV cache holds {limits.num_kv_tokens}: "
            "ask for fewer tokens or start the server with more pages",
        )


def _check_grammar(request: EngineRequest, max_bytes: int) -> None:
    spec = request.grammar
    if spec is not None and (size := len(spec.format_json.encode())) > max_bytes:
        raise RequestError(
            spec.param,
            f"{spec.param} is a grammar of {size} bytes: it may have {max_bytes}; simplify it, or start the "
            "server with a larger max_grammar_bytes",
        )
