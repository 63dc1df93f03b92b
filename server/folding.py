"""`Folding`: ways to rewrite a conversation for chat templates that would drop a part of it.

A chat template may read one system message only, one tool call per message, or no text next to calls. Each field of a
`Folding` works around one such gap; 0 leaves the messages unchanged. Works on plain messages (`server.messages`) and
knows no template: `server.rehearsal` finds the folding that a conversation needs.
"""

import enum
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

PlainMessage = Mapping[str, Any]

INSTRUCTION_ROLES = ("system", "developer")


class Preamble(enum.IntEnum):
    """Where the text of an assistant message with tool calls goes."""

    BESIDE_CALLS = 0
    IN_REASONING = 1  # for calls of the current turn; for calls of finished turns, a message of its own
    OWN_MESSAGE = 2


class Instructions(enum.IntEnum):
    """Where system and developer messages go."""

    AS_SENT = 0
    AS_SYSTEM = 1  # developer messages become system messages
    ONE_AT_HEAD = 2  # joined into one system message that opens the conversation
    IN_USER = 3  # joined in front of the first user message


@dataclass(frozen=True, slots=True, kw_only=True)
class Folding:
    """How to write a conversation."""

    preamble: Preamble = Preamble.BESIDE_CALLS
    null_content: bool = False  # content of assistant messages that only make calls: null, else an empty text
    split_calls: bool = False  # one call per assistant message, each followed by its result
    instructions: Instructions = Instructions.AS_SENT


def all_foldings() -> list[Folding]:
    """Every folding, from the least change to the most."""
    every = itertools.product(Preamble, (False, True), (False, True), Instructions)
    foldings = [Folding(preamble=p, null_content=n, split_calls=s, instructions=i) for p, n, s, i in every]
    return sorted(foldings, key=lambda folding: sum(astuple(folding)))


def fold(messages: Sequence[PlainMessage], folding: Folding) -> list[PlainMessage]:
    """The messages, rewritten as `folding` says."""
    folded = _with_instructions(messages, folding.instructions)
    folded = _with_preambles(folded, folding.preamble)
    folded = _with_results_in_order(folded, split_calls=folding.split_calls)
    if folding.null_content:
        folded = [{**m, "content": None} if m.get("tool_calls") and not m["content"] else m for m in folded]
    return folded


def _with_instructions(messages: Sequence[PlainMessage], place: Instructions) -> list[PlainMessage]:
    if place is Instructions.AS_SENT:
        return list(messages)
    if place is Instructions.AS_SYSTEM:
        return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    text = "\n\n".join(m["content"] for m in messages if m["role"] in INSTRUCTION_ROLES and m["content"])
    others = [m for m in messages if m["role"] not in INSTRUCTION_ROLES]
    if not text:
        return others
    if place is Instructions.ONE_AT_HEAD:
        return [{"role": "system", "content": text}, *others]
    first = next((i for i, m in enumerate(others) if m["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": text}, *others]
    others[first] = {**others[first], "content": f"{text}\n\n{others[first]['content']}"}
    return others


def _with_preambles(messages: Sequence[PlainMessage], place: Preamble) -> list[PlainMessage]:
    if place is Preamble.BESIDE_CALLS:
        return list(messages)
    last_answer = max((i for i, m in enumerate(messages) if is_answer(m)), default=-1)
    folded: list[PlainMessage] = []
    for index, message in enumerate(messages):
        if not (message.get("tool_calls") and message["content"]):
            folded.append(message)
        elif place is Preamble.OWN_MESSAGE or index < last_answer:
            folded += [{"role": "assistant", "content": message["content"]}, {**message, "content": ""}]
        else:
            thought = "\n".join(filter(None, (message.get("reasoning"), message["content"])))
            folded.append({**message, "content": "", **reasoning_fields(thought)})
    return folded


def _with_results_in_order(messages: Sequence[PlainMessage], *, split_calls: bool) -> list[PlainMessage]:
    """Puts results in the order of their calls, because many templates match them by order alone."""
    folded: list[PlainMessage] = []
    taken: set[int] = set()
    for index, message in enumerate(messages):
        if index in taken:
            continue
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            folded.append(message)
            continue
        end = next((i for i in range(index + 1, len(messages)) if messages[i]["role"] == "assistant"), len(messages))
        if not split_calls:
            folded.append(message)
            end = next((i for i in range(index + 1, end) if messages[i]["role"] != "tool"), end)
        results: dict[str, list[int]] = {}
        for i in range(index + 1, end):
            if "tool_call_id" in messages[i] and i not in taken:
                results.setdefault(messages[i]["tool_call_id"], []).append(i)
        num_left = Counter(call["id"] for call in calls)
        for number, call in enumerate(calls):
            if split_calls:
                carrier = message if number == 0 else {"role": "assistant", "content": ""}
                folded.append({**carrier, "tool_calls": [call]})
            num_left[call["id"]] -= 1
            found = results.pop(call["id"], [])
            if num_left[call["id"]]:  # a later call has the same id: one result each, and the last call has the rest
                results[call["id"]] = found[1:]
                found = found[:1]
            taken.update(found)
            folded += [messages[i] for i in found]
    return folded


def is_answer(message: PlainMessage) -> bool:
    """True for an assistant message without calls, which ends a turn."""
    return bool(message["role"] == "assistant" and not message.get("tool_calls"))


def reasoning_fields(thought: str) -> dict[str, str]:
    """Reasoning, under every key that a template may read."""
    return {"reasoning": thought, "reasoning_content": thought, "thinking": thought}
