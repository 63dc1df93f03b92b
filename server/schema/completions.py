"""Wire models of /v1/completions, /tokenize and /detokenize."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator
from typing_extensions import TypedDict, override

from server.schema.chat import ChatMessage, Tool
from server.schema.common import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    FinishReason,
    RequestModel,
    Timings,
    TokenId,
    Usage,
    refusal,
)
from server.schema.limits import Messages, Tools
from server.schema.structured import FormattedRequest

DEFAULT_MAX_TOKENS = 16


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _prompts(value: Any) -> list[str | list[int]]:
    """One prompt or several, each a string or a list of token ids."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) or _is_ids(prompt) for prompt in prompts):
        raise ValueError("must be a string, a list of token ids, or a list of either")
    if not 1 <= len(prompts) <= MAX_CHOICES:
        raise ValueError(f"holds {len(prompts)} prompts: between 1 and {MAX_CHOICES} are supported")
    for prompt in prompts:
        if not isinstance(prompt, str) and not all(0 <= token_id < 2**31 for token_id in prompt):
            raise ValueError("holds a token id that is negative or too large")
    return prompts


_IDS_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}
Prompts = Annotated[
    list[Any],
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                _IDS_SCHEMA,
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": MAX_CHOICES,
                    "items": {"anyOf": [{"type": "string"}, _IDS_SCHEMA]},
                },
            ]
        }
    ),
]


class CompletionRequest(FormattedRequest):
    """A raw completion: the prompt is the model's input as it stands, control tokens included."""

    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None
    suffix: str | None = None
    skip_special_tokens: bool | None = None

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> str | None:
        if value:
            raise ValueError("filling in the middle is not supported")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> "CompletionRequest":
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise refusal("max_tokens", "max_tokens and max_completion_tokens differ: send one of them")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise refusal("best_of", "it is not supported: it must equal n, or be left out")
        if self.prompt_logprobs is not None and self.stream:
            raise refusal("prompt_logprobs", "it is not for streams: use echo with logprobs there")
        if self.logprob_token_ids and self.logprobs != 0:
            raise refusal("logprob_token_ids", "it is only allowed with logprobs: 0, which asks for no others")
        if len(self.prompt) * (self.n or 1) > MAX_CHOICES:
            raise refusal("n", f"n times the number of prompts must not exceed {MAX_CHOICES}")
        return self

    @property
    @override
    def num_answers(self) -> int:
        return len(self.prompt) * (self.n or 1)

    @property
    def names_budget(self) -> bool:
        """Whether the request says how many tokens to generate."""
        return (self.max_tokens, self.max_completion_tokens) != (None, None)

    @property
    def num_wanted(self) -> int:
        """Tokens to generate, 16 if the request does not say."""
        if self.max_tokens is not None:
            return self.max_tokens
        return self.max_completion_tokens or DEFAULT_MAX_TOKENS


class CompletionLogprobs(TypedDict):
    """Four lists of one length; a prompt's first token has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(TypedDict):
    """A token at one place of the prompt; `rank` is null where it is not among the best that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


class CompletionChoice(TypedDict):
    """One choice of an answer or of a chunk.

    `prompt_logprobs`, if asked for: for each prompt token, by token id, itself and the best ones; null for the first.
    `prompt_token_ids` and `token_ids` come with `return_token_ids`.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    """An answer, or a chunk of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings]


class TokenizeRequest(RequestModel):
    """Either a raw prompt, with or without the token that begins every text, or messages to render."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Messages[ChatMessage] | None = None
    tools: Tools[Tool] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise refusal("prompt", "give either prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise refusal("add_special_tokens", "it is for a prompt: the chat template begins messages as they should")
        return self


class DetokenizeRequest(RequestModel):
    """Token ids to text."""

    model: str | None = None
    tokens: list[TokenId] = Field(fail_fast=True)
