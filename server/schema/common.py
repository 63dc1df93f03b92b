"""What chat and completions requests share: strict models, sampling fields, and the hints that are accepted.

A field that would change the answer and is not built has a validator that refuses it by name; an unknown field is
refused unless it is null. Hints are accepted and have no effect.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict, override

from server.schema.limits import MAX_BIASES, MAX_KEYS

MAX_LOGPROBS = 20
MAX_LOGPROB_IDS = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_CHOICES = 128
MAX_TIMEOUT_S = 1e6


def refusal(param: str, message: str) -> PydanticCustomError:
    """An error of a rule between fields, filed under the field to change."""
    return PydanticCustomError("refusal", "{message}", {"param": param, "message": message})


def path_of(location: Sequence[int | str], max_name_chars: int | None = None) -> str:
    """`messages[0].content` from ("messages", 0, "content"); names are cut to `max_name_chars`."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += ("." if path else "") + step[:max_name_chars]
    return path


class WireModel(BaseModel):
    """No unknown fields, no silent conversion, no infinities."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_keys(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_KEYS:
            raise ValueError(f"an object with {len(value)} keys: at most {MAX_KEYS} are accepted")
        return value


class RequestModel(WireModel):
    """The body of a request. A null counts as not given, in unknown fields too: some clients send every field."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": {"type": "null"}})

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _stop_strings(value: Any) -> list[str]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"holds {len(stops)} stop strings: at most {MAX_STOPS} are supported")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"every stop string must have between 1 and {MAX_STOP_CHARS} characters")
    return stops


def _bias_by_id(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be an object from token ids to numbers")
    if len(value) > MAX_BIASES:
        raise ValueError(f"holds {len(value)} token ids: at most {MAX_BIASES} are accepted")
    biases = {}
    for key, bias in value.items():
        if not str(key).isascii() or not str(key).isdigit() or len(str(key)) > 9:
            raise ValueError("keys must be token ids, such as '42'")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError("values must be numbers between -100 and 100")
        biases[int(key)] = float(bias)
    return biases


_STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
StopStrings = Annotated[
    list[str],
    BeforeValidator(_stop_strings),
    WithJsonSchema(
        {
            "anyOf": [
                _STOP_SCHEMA,
                {"type": "array", "items": _STOP_SCHEMA, "maxItems": MAX_STOPS},
                {"type": "null"},
            ]
        }
    ),
]
LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_bias_by_id),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                    "maxProperties": MAX_BIASES,
                },
                {"type": "null"},
            ]
        }
    ),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(WireModel):
    """Usage in a last chunk or, as in vLLM and SGLang, in every chunk. Obfuscation is a hint without effect."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class AnswerRequest(RequestModel):
    """A request that a model answers, at any endpoint. None means: not given."""

    model: str | None = None
    stream: bool | None = None

    @property
    def num_answers(self) -> int:
        """Answers that are asked for."""
        return 1

    @property
    def timeout_s(self) -> float | None:
        """Seconds after which the answer ends with an error, if a field says so."""
        return None

    @property
    def num_ignored_keys(self) -> int:
        """Keys inside the conversation that this service does not know."""
        return 0


class SampledRequest(AnswerRequest):
    """How tokens are chosen, by the names that OpenAI's endpoints share."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S)

    @property
    @override
    def timeout_s(self) -> float | None:
        return self.timeout


class GenerationRequest(SampledRequest):
    """Fields of chat and completions."""

    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_completion_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    logit_bias: LogitBias = {}
    stop: StopStrings = []
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=128)] | None = None
    ignore_eos: bool | None = None
    logprob_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_LOGPROB_IDS)] | None = None
    return_token_ids: bool | None = None
    return_timings: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)

    # Hints: parameters of the OpenAI API that do not change what a correct answer is.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    prediction: Any = None

    @property
    @override
    def num_answers(self) -> int:
        return self.n or 1

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "it is only allowed with stream: true")
        return self


class PromptTokensDetails(TypedDict):
    """Share of the prompt that came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """Share of the answer that is reasoning."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Tokens of a request, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class Timings(TypedDict):
    """Where the time of an answer went, in milliseconds; of several choices, the longest times in the engine.

    `queue_ms` in the engine's queue, `prefill_ms` from there to the first token; `first_token_ms`, `decode_ms` and
    `total_ms` as the HTTP process sees them: until the first token, from there to the last, and until the end.
    """

    queue_ms: float
    prefill_ms: float
    first_token_ms: float
    decode_ms: float
    total_ms: float


FinishReason = Literal["stop", "length", "tool_calls"]
