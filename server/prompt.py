"""`ChatTemplate`: messages to ids by the checkpoint's own template. What users write never becomes a control token.

Only the template may write control tokens. Before rendering, we replace the first letter of every control token in the
user's strings by a character that occurs nowhere in the request. We split the rendered text at its control tokens, put
the letters back in the pieces between them, and tokenize those pieces as plain text.
"""

import enum
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta

from loaders.chat_templates import TemplateText
from server.errors import BadRequest, SettingError
from server.template_environment import TemplateEnvironment
from server.text_limit import NO_LIMIT, TextLimit

# Noncharacters first, which no text should contain; then private use.
_STAND_INS = (*range(0xFDD0, 0xFDF0), *range(0xF0000, 0xF1000))
_REFUSALS = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError,
)  # fmt: skip
"""What a template raises that does not suit a conversation."""
_END = -1  # in place of a first letter: the end of the content that an answer continues


class PromptTokenizer(Protocol):
    """The part of a tokenizer that rendering needs."""

    special_tokens: dict[str, int]
    named_tokens: dict[str, str]
    chat_template: TemplateText | None
    tool_template: TemplateText | None

    def encode(self, text: str, *, allow_special: bool = True) -> list[int]:
        """Ids of a text."""


class Ending(enum.Enum):
    """Where the ids of a conversation end."""

    ANSWER_BEGINS = enum.auto()  # the template has opened the assistant's answer
    LAST_MESSAGE = enum.auto()  # after the last message
    IN_LAST_MESSAGE = enum.auto()  # after the content of the last message, which the answer continues


class TemplateRefusal(Exception):
    """The template raised an error; the text is its reason."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    template: Template
    variables: Set[str]  # that it reads


class ChatTemplate:
    """The compiled chat template with its tokenizer. A model may have another template for conversations with tools."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        """Compile the templates.

        Raises:
            SettingError: a template is not valid Jinja; names the file and the line.
        """
        self._tokenizer = tokenizer
        plain, for_tools = tokenizer.chat_template, tokenizer.tool_template or tokenizer.chat_template
        self._plain = None if plain is None else _compiled(plain)
        self._for_tools = None if for_tools is None else _compiled(for_tools)
        names = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._first_letters = sorted({name[0] for name in names})

    def variables(self, *, has_tools: bool) -> Set[str]:
        """The variables that the template reads which renders conversations with tools, or without."""
        compiled = self._for_tools if has_tools else self._plain
        return frozenset() if compiled is None else compiled.variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        limit: TextLimit = NO_LIMIT,
        ending: Ending = Ending.ANSWER_BEGINS,
    ) -> list[int]:
        """Ids of the prompt up to its `ending`.

        Raises:
            ContextTooLong: the text exceeds the limit, which is checked before tokenizing.
            BadRequest: the model has no template, or the template refuses the conversation or the tools.
        """
        if self._plain is None:
            raise BadRequest("this model has no chat template: use /v1/completions", param="messages")
        begins_answer = ending is Ending.ANSWER_BEGINS
        data = {"messages": messages, "tools": tools or None, "add_generation_prompt": begins_answer, **variables}
        disguise = self._disguise_for(data)
        restore = {stand_in: letter for letter, stand_in in disguise.items() if letter != _END}
        mark = chr(disguise.pop(_END))
        if ending is Ending.IN_LAST_MESSAGE:
            data["messages"] = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + mark}]
        try:
            text = self.text(**_map_strings(data, disguise))
        except TemplateRefusal as error:
            param = "tools" if tools and self._can_render({**data, "tools": None}) else "messages"
            reason = str(error).translate(restore)
            raise BadRequest(f"{param}: the model's chat template refuses them: {reason}", param=param) from error
        if ending is Ending.IN_LAST_MESSAGE:
            text, found, _ = text.rpartition(mark)
            if not found:
                reason = "the model's chat template leaves out the content of the last message"
                raise BadRequest(f"continue_final_message: {reason}", param="continue_final_message")
        limit.check(text, restore)
        return self._encode(text, restore)

    def text(self, **data: Any) -> str:
        """Render messages, tools and template variables unchanged. Raises TemplateRefusal."""
        compiled = self._for_tools if data.get("tools") else self._plain
        if compiled is None:
            raise TemplateRefusal("there is no template")
        defaults = {"bos_token": "", "eos_token": "", **self._tokenizer.named_tokens, "add_generation_prompt": True}
        try:
            return compiled.template.render(**{**defaults, **data})
        except _REFUSALS as error:
            raise TemplateRefusal(str(error) or type(error).__name__) from error

    def _can_render(self, data: Mapping[str, Any]) -> bool:
        try:
            self.text(**data)
        except TemplateRefusal:
            return False
        return True

    def _disguise_for(self, data: Any) -> dict[int, int]:
        """The stand-in for each first letter, both as code points, and for `_END`.

        Raises BadRequest if no character is left for it.
        """
        used = set().union(*map(set, _strings(data)))
        free = (code for code in _STAND_INS if chr(code) not in used)
        try:
            return {code: next(free) for code in (*map(ord, self._first_letters), _END)}
        except StopIteration:
            raise BadRequest("the messages hold too many private-use characters", param="messages") from None

    def _encode(self, text: str, restore: Mapping[int, int]) -> list[int]:
        ids: list[int] = []
        end = 0
        for control in self._control.finditer(text):
            ids += self._encode_plain(text[end : control.start()].translate(restore))
            ids.append(self._tokenizer.special_tokens[control[0]])
            end = control.end()
        return ids + self._encode_plain(text[end:].translate(restore))

    def _encode_plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, allow_special=False) if text else []


def _compiled(source: TemplateText) -> _Compiled:
    """The compiled template. Raises SettingError as `ChatTemplate` does."""
    try:
        return _compile(source.text)
    except TemplateSyntaxError as error:
        where = f"{source.file}: line {error.lineno} of the chat template"
        raise SettingError(f"--model: {where} cannot be compiled: {error.message}") from error


@lru_cache(maxsize=16)
def _compile(source: str) -> _Compiled:
    """Compile a text; raises TemplateSyntaxError.

    Remembered, because a start asks twice: to refuse a bad template early, and to serve.
    """
    environment = TemplateEnvironment()
    tree = environment.parse(source)
    variables = frozenset(meta.find_undeclared_variables(tree))
    return _Compiled(environment.from_string(tree), variables)


def _strings(value: Any) -> Iterable[str]:
    """Every string in a tree of dictionaries and lists, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, table: Mapping[int, int]) -> Any:
    """The same tree with `str.translate` applied to every string."""
    if isinstance(value, str):
        return type(value)(value.translate(table))
    if isinstance(value, Mapping):
        return {_map_strings(key, table): _map_strings(item, table) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, table) for item in value]
    return value
