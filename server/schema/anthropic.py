"""Wire models of Anthropic's /v1/messages and /v1/messages/count_tokens: requests, answers and events."""

from functools import partial
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from typing_extensions import TypedDict, override

from server.schema.chat import TEXT_SCHEMA, HistoryModel, joined_text
from server.schema.common import AnswerRequest, StopStrings, WireModel, refusal
from server.schema.limits import MAX_PARTS, FreeObject, Messages, Tools

_Text = Annotated[str | None, BeforeValidator(partial(joined_text, types=("text",))), WithJsonSchema(TEXT_SCHEMA)]
_NEEDED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}


class ContentBlock(HistoryModel):
    """One block of a message; which fields its type needs is checked here. `signature` is not read."""

    type: Literal["text", "thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = Field(None, min_length=1)
    name: str | None = Field(None, min_length=1, max_length=256)
    input: FreeObject | None = None
    tool_use_id: str | None = None
    content: _Text = None
    is_error: bool | None = None
    cache_control: Any = None
    citations: Any = None
    caller: Any = None

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> "ContentBlock":
        for name in _NEEDED[self.type]:
            if getattr(self, name) is None:
                raise refusal(name, f"a block of type '{self.type}' needs it")
        return self


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_Blocks = Annotated[list[ContentBlock], Field(fail_fast=True, max_length=MAX_PARTS)]
_ALLOWED = {
    "user": {"text", "tool_result"},
    "assistant": {"text", "thinking", "tool_use"},
    "system": {"text"},
}


class AnthropicMessage(HistoryModel):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[_Blocks, BeforeValidator(_blocks, json_schema_input_type=str | _Blocks)]

    @model_validator(mode="after")
    def _has_fit_blocks(self) -> "AnthropicMessage":
        for index, block in enumerate(self.content):
            if block.type not in _ALLOWED[self.role]:
                raise refusal(
                    f"content[{index}]", f"a message of role '{self.role}' has no block of type '{block.type}'"
                )
        return self

    @property
    @override
    def num_ignored_keys(self) -> int:
        return super().num_ignored_keys + sum(block.num_ignored_keys for block in self.content)


class AnthropicTool(HistoryModel):
    """A tool that the client runs. Chat's model of a function checks the rest of it."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: FreeObject
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None


class AnthropicToolChoice(WireModel):
    """Whether the model may, must, or must not call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_the_tool(self) -> "AnthropicToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise refusal("name", "it belongs to type 'tool', which needs it")
        return self


class Thinking(WireModel):
    """`enabled` bounds the reasoning, `disabled` leaves it empty, `adaptive` is what the model does by itself.

    With the display `omitted` its blocks are empty; `summarized` shows all of it, as does no display.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, lt=2**31)
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _has_a_budget(self) -> "Thinking":
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise refusal("budget_tokens", "it belongs to type 'enabled', which needs it")
        return self


class OutputFormat(WireModel):
    """A JSON schema for the text."""

    type: Literal["json_schema"]
    schema_: FreeObject = Field(alias="schema")


class OutputConfig(WireModel):
    """Effort of the reasoning, and the form of the text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(AnswerRequest):
    """What has a part in the prompt; other settings of an answer are accepted, so that a client may send the same."""

    messages: Messages[AnthropicMessage]
    system: _Text = None
    tools: Tools[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None

    @property
    @override
    def num_ignored_keys(self) -> int:
        return sum(part.num_ignored_keys for part in (*self.messages, *(self.tools or ())))

    @model_validator(mode="after")
    def _check_conversation(self) -> "CountTokensRequest":
        known: set[str | None] = set()
        for index, message in enumerate(self.messages):
            for place, block in enumerate(message.content):
                where = f"messages[{index}].content[{place}]"
                if block.type == "tool_result" and block.tool_use_id not in known:
                    raise refusal(f"{where}.tool_use_id", "no assistant message before it has a tool_use with this id")
                known.add(block.id)
        last = self.messages[-1]
        if last.role == "assistant":
            if not last.content or last.content[-1].type != "text" or not last.content[-1].text:
                raise refusal(
                    "messages", "a last message of the assistant must end with text, which the answer continues"
                )
            if any(block.type == "tool_use" for block in last.content):
                raise refusal(
                    "messages",
                    "a last message of the assistant is continued, so it must hold no tool_use: add the results",
                )
        return self


class MessagesRequest(CountTokensRequest):
    """A request for the next message of the assistant."""

    max_tokens: int = Field(ge=1)
    stop_sequences: StopStrings = Field([])
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)

    # Hints: they change no answer of this service.
    metadata: Any = None
    service_tier: Any = None

    @model_validator(mode="after")
    def _leaves_room_for_an_answer(self) -> "MessagesRequest":
        if self.thinking and (self.thinking.budget_tokens or 0) >= self.max_tokens:
            raise refusal("thinking.budget_tokens", "it must be below max_tokens, which counts the answer, too")
        return self


class AnthropicUsage(TypedDict):
    """Tokens. `input_tokens` are those of the prompt that did not come from the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnswerBlock(TypedDict, total=False):
    """A block of an answer: text, thinking or tool_use."""

    type: str
    text: str
    thinking: str
    signature: str
    id: str
    name: str
    input: dict[str, Any]


class AnthropicAnswer(TypedDict):
    """The assistant's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicEvent(TypedDict):
    """An event of a streamed answer; `type` is also its name, and says which of the other fields it has."""

    type: str
    message: NotRequired[AnthropicAnswer]
    index: NotRequired[int]
    content_block: NotRequired[AnswerBlock]
    delta: NotRequired[dict[str, Any]]
    usage: NotRequired[AnthropicUsage]
    error: NotRequired[dict[str, str]]


class TokenCount(TypedDict):
    """Tokens of a prompt."""

    input_tokens: int


class AnthropicErrorDetails(TypedDict):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorBody(TypedDict):
    """Body of every error of these routes."""

    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str
