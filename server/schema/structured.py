"""Wire models of structured outputs and forced calls: `response_format`, `structured_outputs`, `tool_choice`.

What a schema, expression or grammar may say is checked by `server.structured`.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema, model_validator

from server.schema.common import GenerationRequest, WireModel, path_of, refusal
from server.schema.limits import MAX_CHOICE_TEXTS, MAX_PROPERTIES, FreeObject, Tools

Text = Annotated[str, Field(max_length=65536)]
Choices = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICE_TEXTS)]
_FORMAT_TYPES = ("text", "json_object", "json_schema", "structural_tag")
GUIDED_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
"""Names that vLLM no longer has, and what took their place in `structured_outputs`."""


class JsonSchemaFormat(WireModel):
    """A named schema. Answers are bound to it with and without `strict`."""

    name: str = Field(max_length=64)
    description: str | None = None
    schema_: FreeObject | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(WireModel):
    """The form of the content: any text, JSON, or a structural tag (`format`, or vLLM's older two fields)."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    format: FreeObject | None = None
    structures: Tools[FreeObject] | None = None
    triggers: Choices | None = None

    @model_validator(mode="after")
    def _check_together(self) -> "ResponseFormat":
        if self.type not in _FORMAT_TYPES:
            raise ValueError(f"type '{self.type[:40]}' is not supported: {', '.join(_FORMAT_TYPES)} are")
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise refusal("json_schema", "it belongs to type 'json_schema', which needs it")
        has_tag = self.format is not None or (self.structures is not None and self.triggers is not None)
        is_tag = self.type == "structural_tag"
        if is_tag and not has_tag:
            raise refusal("format", "type 'structural_tag' needs it, or structures and triggers")
        if not is_tag and (self.format, self.structures, self.triggers) != (None, None, None):
            raise refusal("type", "format, structures and triggers belong to type 'structural_tag'")
        return self


def _object_or_text(value: Any) -> Any:
    """Refuses what is neither, since a union's error would name its branches as if they were fields."""
    if value is not None and not isinstance(value, dict | str):
        raise ValueError("must be an object, or its JSON text")
    if isinstance(value, dict) and len(value) > MAX_PROPERTIES:
        raise ValueError(f"has {len(value)} keys: at most {MAX_PROPERTIES} are accepted")
    return value


_ObjectOrText = Annotated[FreeObject | str | None, BeforeValidator(_object_or_text)]
_Schema = Annotated[
    FreeObject | str | bool | None,
    BeforeValidator(lambda value: value if isinstance(value, bool) else _object_or_text(value)),
]


class StructuredOutputs(WireModel):
    """vLLM's field: exactly one rule for the content."""

    json_: _Schema = Field(None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: _ObjectOrText = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "StructuredOutputs":
        given = [name for name, value in self if value is not None and value is not False]
        if len(given) != 1:
            raise ValueError("give exactly one of json, regex, choice, grammar, json_object, structural_tag")
        return self


class FormattedRequest(GenerationRequest):
    """A request whose answer may be bound to a form."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_guided_fields(cls, value: Any) -> Any:
        for name in value if isinstance(value, dict) else ():
            if name.startswith("guided_") and value[name] is not None:
                hint = f" with '{GUIDED_FIELDS[name]}'" if name in GUIDED_FIELDS else ""
                raise refusal(name[:64], f"it is not supported: send structured_outputs{hint}")
        return value

    @model_validator(mode="after")
    def _one_form(self) -> "FormattedRequest":
        if self.structured_outputs and self.response_format and self.response_format.type != "text":
            raise refusal("structured_outputs", "send either it or response_format")
        return self


class FunctionName(WireModel):
    """A function by its name."""

    name: str


class NamedTool(WireModel):
    """One function."""

    type: Literal["function"]
    function: FunctionName


class ToolSubset(WireModel):
    """Some of the tools, and whether one must be called."""

    mode: Literal["auto", "required"]
    tools: Tools[NamedTool]


class AllowedTools(WireModel):
    """`tool_choice` for some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


def _tool_choice(value: Any) -> Any:
    kinds: dict[str, type[WireModel]] = {"function": NamedTool, "allowed_tools": AllowedTools}
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or value in ("auto", "none", "required"):
        return value
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError("must be auto, none, required, or an object of type function or allowed_tools")
    try:
        return kinds[kind].model_validate(value)
    except ValidationError as error:  # a union would report what is wrong with every kind
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise refusal(path_of(problem["loc"]), problem["msg"]) from None


ToolChoice = Annotated[
    Literal["auto", "none", "required"] | NamedTool | AllowedTools | None,
    BeforeValidator(_tool_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["auto", "none", "required"]},
                {"type": "object", "properties": {"type": {"enum": ["function", "allowed_tools"]}}},
                {"type": "null"},
            ]
        }
    ),
]
