"""Wire models of /v1/chat/completions: messages, tools, the request, and the shapes of answers and chunks."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator, model_validator
from typing_extensions import TypedDict, override

from server.schema.common import MAX_LOGPROBS, FinishReason, Timings, Usage, WireModel, refusal
from server.schema.limits import MAX_PARTS, FreeObject, Messages, Modalities, ToolCalls, Tools
from server.schema.structured import FormattedRequest, ToolChoice

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
TEXT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "object"}, "maxItems": MAX_PARTS},
        {"type": "null"},
    ]
}


def joined_text(value: Any, *, types: tuple[str, ...] = _TEXT_PARTS) -> str | None:
    """A string, or text parts of these types joined by line breaks. Raises ValueError for anything else."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    if len(value) > MAX_PARTS:
        raise ValueError(f"has {len(value)} parts: at most {MAX_PARTS} are accepted")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ValueError(f"part {index} must be an object with a type")
        if part["type"] not in types:
            raise ValueError(f"part {index} has type '{part['type'][:40]}': this service reads text parts only")
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        if not isinstance(text, str):
            raise ValueError(f"part {index} must have its text as a string")
        texts.append(text)
    return "\n".join(texts)


Text = Annotated[str | None, BeforeValidator(joined_text), WithJsonSchema(TEXT_SCHEMA)]


class HistoryModel(WireModel):
    """Part of a conversation that a client sends back. Other services add keys of their own, which are ignored."""

    model_config = ConfigDict(extra="allow")

    @property
    def num_ignored_keys(self) -> int:
        """Keys that this service does not know."""
        return len(self.model_extra or {})


class FunctionCall(HistoryModel):
    """A call as an assistant message reports it: arguments as the JSON text the model wrote, or as an object."""

    name: str = Field(min_length=1, max_length=256)
    arguments: Any = Field(None, validate_default=True, json_schema_extra={"type": ["string", "object", "null"]})

    @field_validator("arguments")
    @classmethod
    def _text_or_object(cls, value: Any) -> Any:
        if not isinstance(value, str | dict | None):
            raise ValueError("must be a string or an object")
        return {} if value is None else value


class ToolCall(HistoryModel):
    """One call of an assistant message."""

    id: str = Field(min_length=1)
    type: Literal["function"] | None = "function"
    index: int | None = None
    function: FunctionCall

    @property
    def num_ignored_keys(self) -> int:
        """Keys that this service does not know, the function's included."""
        return super().num_ignored_keys + self.function.num_ignored_keys


class ChatMessage(HistoryModel):
    """One message of any role; which fields a role may have is checked here."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = None
    name: str | None = None
    reasoning: Text = None
    reasoning_content: Text = None
    tool_calls: ToolCalls[ToolCall] | None = None
    tool_call_id: str | None = None
    annotations: Any = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _check_role(self) -> "ChatMessage":
        if self.role != "assistant":
            if self.content is None:
                raise ValueError(f"a message of role '{self.role}' needs content")
            if self.tool_calls or self.reasoning or self.reasoning_content:
                raise ValueError(f"a message of role '{self.role}' has neither tool_calls nor reasoning")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a message of role 'tool' needs the tool_call_id of the call it answers")
        if self.role != "tool" and self.tool_call_id:
            raise ValueError(f"a message of role '{self.role}' has no tool_call_id")
        return self

    @property
    def text(self) -> str | None:
        """What the message says: its content, and an assistant's refusal."""
        if not (self.refusal and self.role == "assistant"):
            return self.content
        return "\n".join(filter(None, (self.content, self.refusal)))

    @property
    def thought(self) -> str | None:
        """The reasoning, under either of its names."""
        return self.reasoning or self.reasoning_content

    @property
    def num_ignored_keys(self) -> int:
        """Keys that this service does not know, those of the calls included."""
        return super().num_ignored_keys + sum(call.num_ignored_keys for call in self.tool_calls or ())


class FunctionSpec(HistoryModel):
    """A function the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: FreeObject | None = None
    strict: bool | None = None


class Tool(HistoryModel):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionSpec

    @property
    def num_ignored_keys(self) -> int:
        """Keys that this service does not know, the function's included."""
        return super().num_ignored_keys + self.function.num_ignored_keys


class ChatCompletionRequest(FormattedRequest):
    """A chat request."""

    messages: Messages[ChatMessage]
    max_tokens: int | None = Field(None, ge=1)
    tools: Tools[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, max_length=32)
    chat_template_kwargs: FreeObject | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    thinking_token_budget: int | None = Field(None, ge=0, lt=2**31)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: Modalities[Literal["text"]] | None = None

    @property
    @override
    def num_ignored_keys(self) -> int:
        return sum(part.num_ignored_keys for part in (*self.messages, *(self.tools or ())))

    @model_validator(mode="after")
    def _check_together(self) -> "ChatCompletionRequest":
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise refusal("max_tokens", "max_tokens and max_completion_tokens differ: send one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise refusal("top_logprobs", "it is only allowed with logprobs: true")
        if self.logprob_token_ids and (not self.logprobs or self.top_logprobs):
            raise refusal("logprob_token_ids", "it is only allowed with logprobs: true, and instead of top_logprobs")
        if self.continue_final_message:
            self._check_continuation()
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise refusal("tools", "two functions have the same name")
        return self

    def _check_continuation(self) -> None:
        if self.add_generation_prompt:
            raise refusal("add_generation_prompt", "it begins a new message: it contradicts continue_final_message")
        last = self.messages[-1]
        if last.role != "assistant" or last.tool_calls or not last.text:
            raise refusal(
                "continue_final_message", "the last message must be an assistant's, with content, no tool_calls"
            )


class TopLogprob(TypedDict):
    """An alternative to a token; `bytes` are its exact UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the content with its alternatives, best first."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """One entry for every token of the content, in order."""

    content: list[TokenLogprob]


class ToolCallAnswer(TypedDict, total=False):
    """A call, or a piece of one: `id`, `type` and the name come once, in its first piece."""

    index: int
    id: str
    type: str
    function: dict[str, str]


class AnswerMessage(TypedDict, total=False):
    """A message, or the new part of one. `reasoning` and `reasoning_content` are the same text under both names."""

    role: str
    content: str | None
    reasoning: str | None
    reasoning_content: str | None
    tool_calls: list[ToolCallAnswer]
    refusal: None


class ChatChoice(TypedDict):
    """One choice of an answer (`message`) or of a chunk (`delta`). `token_ids` come with `return_token_ids`."""

    index: int
    message: NotRequired[AnswerMessage]
    delta: NotRequired[AnswerMessage]
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    """An answer, or a chunk of a streamed one. `prompt_token_ids` come with `return_token_ids`, in one chunk."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    prompt_token_ids: NotRequired[list[int]]
    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings]
