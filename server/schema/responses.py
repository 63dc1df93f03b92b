"""Wire models of /v1/responses: the request with its input items, and the shapes of answers and events."""

from functools import partial
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator
from typing_extensions import TypedDict, override

from server.schema.chat import TEXT_SCHEMA, HistoryModel, TokenLogprob, joined_text
from server.schema.common import MAX_LOGPROBS, SampledRequest, WireModel, refusal
from server.schema.limits import MAX_MESSAGES, FreeObject, Tools

LOGPROBS = "message.output_text.logprobs"
INCLUSIONS = (LOGPROBS, "reasoning.encrypted_content")
"""What `include` may hold. Reasoning is never encrypted: it is returned in full, so clients can send it back."""
_CONTENT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text")
_SUMMARY_PARTS = ("summary_text",)
_OUTPUT_PARTS = ("input_text", "output_text", "text")
_Content = Annotated[
    str | None, BeforeValidator(partial(joined_text, types=_CONTENT_PARTS)), WithJsonSchema(TEXT_SCHEMA)
]
_Summary = Annotated[
    str | None, BeforeValidator(partial(joined_text, types=_SUMMARY_PARTS)), WithJsonSchema(TEXT_SCHEMA)
]
_Output = Annotated[str | None, BeforeValidator(partial(joined_text, types=_OUTPUT_PARTS)), WithJsonSchema(TEXT_SCHEMA)]


class InputItem(HistoryModel):
    """One item of the input: a message, a function call, its result, or reasoning, as an answer's `output` has them.

    Which fields a type needs is checked here.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: _Content = None
    call_id: str | None = Field(None, min_length=1)
    name: str | None = Field(None, min_length=1, max_length=256)
    arguments: str | None = None
    output: _Output = None
    summary: _Summary = None
    encrypted_content: str | None = None

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> "InputItem":
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "reasoning": (),
        }
        for name in needed[self.type]:
            if getattr(self, name) is None:
                raise refusal(name, f"an item of type '{self.type}' needs it")
        if self.type == "reasoning" and self.encrypted_content and not (self.content or self.summary):
            raise refusal("encrypted_content", "this service cannot read it: send the reasoning's content")
        return self

    @property
    def thought(self) -> str | None:
        """What a reasoning item says: its content, or else its summary."""
        return self.content or self.summary


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_Items = Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
Input = Annotated[_Items, BeforeValidator(_items, json_schema_input_type=str | _Items)]


class FunctionTool(HistoryModel):
    """A function that the model may call. Chat's model of a function checks the rest of it."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: FreeObject | None = None
    strict: bool | None = None


class Reasoning(WireModel):
    """How much to reason. The whole reasoning is returned, so there is no summary."""

    effort: str | None = Field(None, max_length=32)
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class TextFormat(WireModel):
    """Free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: FreeObject | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _only_a_schema_has_fields(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise refusal("schema", "it is needed for type 'json_schema', and only there")
        if self.type == "json_schema" and not self.name:
            raise refusal("name", "type 'json_schema' needs it")
        return self


class TextConfig(WireModel):
    """The form of the text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(WireModel):
    """Obfuscation is a hint without effect."""

    include_obfuscation: bool | None = None


class ResponsesRequest(SampledRequest):
    """A request of /v1/responses."""

    input: Input
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    store: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    tools: Tools[FunctionTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[str], Field(fail_fast=True, max_length=16)] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    truncation: Literal["disabled"] | None = None
    background: bool | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    stream_options: ResponseStreamOptions | None = None

    # Hints: parameters of the OpenAI API that do not change what a correct answer is.
    max_tool_calls: Any = None  # counts calls of built-in tools, and there are none
    user: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None

    @field_validator("background")
    @classmethod
    def _not_in_background(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("answers are not computed in the background: send the request without it")
        return value

    @field_validator("include")
    @classmethod
    def _known_inclusions(cls, value: list[str] | None) -> list[str] | None:
        for name in value or ():
            if name not in INCLUSIONS:
                raise ValueError(f"'{name[:64]}' is not supported: only '{LOGPROBS}' has an effect")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> "ResponsesRequest":
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "it is only allowed with stream: true")
        if self.top_logprobs is not None and not self.has_logprobs:
            raise refusal("top_logprobs", f"it is only allowed with '{LOGPROBS}' in include")
        return self

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities were asked for."""
        return LOGPROBS in (self.include or ())

    @property
    @override
    def num_ignored_keys(self) -> int:
        return sum(part.num_ignored_keys for part in (*self.input, *(self.tools or ())))


class TextPart(TypedDict):
    """A part of a message (`output_text`, which has annotations and log-probabilities) or of reasoning."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[TokenLogprob]]


class OutputItem(TypedDict):
    """What the model produced: reasoning, a message, or a function call; each has fields of its own."""

    id: str
    type: Literal["reasoning", "message", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[TextPart]]
    summary: NotRequired[list[Any]]
    encrypted_content: NotRequired[None]
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]


class ResponseError(TypedDict):
    """Why an answer failed."""

    code: str
    message: str


class ResponseUsage(TypedDict):
    """Tokens of an answer."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseBody(TypedDict):
    """An answer, with the settings that it was made with."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class ResponseEvent(TypedDict):
    """One event of a stream; `type` is also its name, and says which of the other fields it has."""

    type: str
    sequence_number: int
    response: NotRequired[ResponseBody]
    output_index: NotRequired[int]
    item: NotRequired[OutputItem]
    item_id: NotRequired[str]
    content_index: NotRequired[int]
    part: NotRequired[TextPart]
    delta: NotRequired[str]
    text: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    logprobs: NotRequired[list[TokenLogprob]]


class DeletedResponse(TypedDict):
    """Says that a stored answer is gone."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]
