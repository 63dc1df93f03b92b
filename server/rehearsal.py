"""`Rehearsal`: finds the folding with which no part of a conversation is missing from the prompt, or names the part.

What a template leaves out depends on the shape of a conversation: roles, their order, which parts each message has.
So a conversation of the same shape, with a marker word in every part, is rendered once, and we look for its markers.
If one is missing, the foldings are tried, from the least change to the most. Reasoning has no marker: templates drop
the reasoning of earlier turns, or all of it, by design.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from server.errors import BadRequest
from server.folding import Folding, PlainMessage, all_foldings, fold, reasoning_fields
from server.prompt import ChatTemplate, TemplateRefusal
from server.template_environment import JsonText

_MAX_SHAPES = 1024  # only short conversations and short template variables are remembered: about 20 MB
_MAX_VARIABLES_CHARS = 256
_MAX_SEARCHED = 128  # messages and calls; a longer conversation is condensed before the foldings are tried
_MAX_ALIKE = 2  # messages of one kind in a condensed conversation
_MAX_CALLS = 4  # in each of them
_MAX_UNITS = _MAX_SEARCHED // (1 + 2 * _MAX_CALLS)  # assistant messages with their results
_TOOL_NAME = "moetoolname"
_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "words",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
_MARKER = re.compile(rf"{_TOOL_NAME}|moe\d+(?:content|call\d+(?:name|value))")


@dataclass(frozen=True, slots=True)
class MessageShape:
    """All that a template can see of a message except its words. Call ids are numbered through the conversation."""

    role: str
    has_content: bool
    has_reasoning: bool
    has_name: bool
    call_ids: tuple[int, ...]
    answers_id: int | None


Shape = tuple[MessageShape, ...]


class Rehearsal:
    """Finds foldings and remembers them by the conversation's shape."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._folding_of = lru_cache(maxsize=_MAX_SHAPES)(self._find_folding)

    def folding_for(
        self, messages: Sequence[PlainMessage], variables: Mapping[str, Any], *, has_tools: bool
    ) -> Folding:
        """The folding that changes least and leaves nothing out; no folding if the template refuses them all.

        Raises:
            BadRequest: with every folding the template leaves a part out; names the part.
        """
        shape = shape_of(messages)
        words = json.dumps(variables, sort_keys=True)
        is_short = _size(shape) <= _MAX_SEARCHED and len(words) <= _MAX_VARIABLES_CHARS
        found = (self._folding_of if is_short else self._find_folding)(shape, words, has_tools)
        if isinstance(found, Folding):
            return found
        raise BadRequest(
            f"{found}: the model's chat template leaves it out, so the model would not see it", param=found
        )

    def _find_folding(self, shape: Shape, variables: str, has_tools: bool) -> Folding | str:
        """A folding; or, if none helps, the part that the best folding leaves out."""
        foldings: Iterable[Folding] = all_foldings()
        if _size(shape) > _MAX_SEARCHED:
            found = self._find_folding(condensed(shape), variables, has_tools)
            foldings = [found if isinstance(found, Folding) else Folding()]
        tools = [_TOOL] if has_tools else None
        markers = _markers_of(shape, has_tools=has_tools)
        tried: list[list[PlainMessage]] = []
        fewest: list[str] | None = None
        for folding in foldings:
            messages = fold(_marked(shape), folding)
            if messages in tried:
                continue
            tried.append(messages)
            try:
                text = self._template.text(messages=messages, tools=tools, **json.loads(variables))
            except TemplateRefusal:
                continue
            shown = set(_MARKER.findall(text))
            lost = [part for part, words in markers.items() if not shown.issuperset(words)]
            if not lost:
                return folding
            if fewest is None or len(lost) < len(fewest):
                fewest = lost
        return Folding() if fewest is None else fewest[0]


def shape_of(messages: Sequence[PlainMessage]) -> Shape:
    """The shape of a conversation."""
    numbers: dict[str, int] = {}
    return tuple(
        MessageShape(
            role=message["role"],
            has_content=bool(message["content"]),
            has_reasoning="reasoning" in message,
            has_name="name" in message,
            call_ids=tuple(numbers.setdefault(call["id"], len(numbers)) for call in message.get("tool_calls", ())),
            answers_id=numbers.get(message.get("tool_call_id", "")),
        )
        for message in messages
    )


def condensed(shape: Shape) -> Shape:
    """A short conversation with every kind of message that a long one has.

    It drops an assistant message together with its tool results, and only if enough others of the same kind stay.
    """
    units: list[list[MessageShape]] = []
    for message in shape:
        if message.role == "tool" and units:
            units[-1].append(message)
        else:
            units.append([message])
    kept: list[Shape] = []
    num_alike: Counter[Shape] = Counter()
    for index, unit in enumerate(units):
        first = replace(unit[0], call_ids=unit[0].call_ids[:_MAX_CALLS])
        answers = {message.answers_id: message for message in unit[1:] if message.answers_id in first.call_ids}
        short = (first, *answers.values())
        kind = _numbered_anew(short)
        num_alike[kind] += 1
        if num_alike[kind] <= _MAX_ALIKE or index >= len(units) - _MAX_ALIKE:
            kept.append(short)
    if sum(map(_size, kept)) > _MAX_SEARCHED:
        kept = [*kept[: _MAX_UNITS // 2], *kept[-(_MAX_UNITS // 2) :]]
    return tuple(message for unit in kept for message in unit)


def _numbered_anew(unit: Shape) -> Shape:
    """The same messages with call ids numbered from 0."""
    number: dict[int | None, int] = {call: position for position, call in enumerate(unit[0].call_ids)}
    return tuple(
        replace(m, call_ids=tuple(number[i] for i in m.call_ids), answers_id=number.get(m.answers_id)) for m in unit
    )


def _size(shape: Iterable[MessageShape]) -> int:
    return sum(1 + len(message.call_ids) for message in shape)


def _marked(shape: Shape) -> list[PlainMessage]:
    """A conversation of this shape whose parts are marker words."""
    messages: list[PlainMessage] = []
    for index, part in enumerate(shape):
        message: dict[str, Any] = {"role": part.role, "content": _word(index, "content") if part.has_content else ""}
        if part.has_reasoning:
            message.update(reasoning_fields(_word(index, "reasoning")))
        if part.has_name:
            message["name"] = "name"
        if part.call_ids:
            message["tool_calls"] = [_call(index, number, call) for number, call in enumerate(part.call_ids)]
        if part.answers_id is not None:
            message["tool_call_id"] = _call_id(part.answers_id)
        messages.append(message)
    return messages


def _markers_of(shape: Shape, *, has_tools: bool) -> dict[str, list[str]]:
    """The marker words of every part that must not be lost, by the part's name in the request."""
    markers = {"tools": [_TOOL_NAME]} if has_tools else {}
    for index, part in enumerate(shape):
        if part.has_content:
            markers[f"messages[{index}].content"] = [_word(index, "content")]
        for number in range(len(part.call_ids)):
            words = [_word(index, f"call{number}name"), _word(index, f"call{number}value")]
            markers[f"messages[{index}].tool_calls[{number}]"] = words
    return markers


def _call(index: int, number: int, call: int) -> dict[str, Any]:
    arguments = JsonText(json.dumps({_word(index, f"call{number}value"): 1}))
    function = {"name": _word(index, f"call{number}name"), "arguments": arguments}
    return {"id": _call_id(call), "type": "function", "function": function}


def _call_id(number: int) -> str:
    return f"call{number:05d}"


def _word(index: int, part: str) -> str:
    """A word that no other marker contains: its numbers cannot be part of longer numbers."""
    return f"moe{index}{part}"
