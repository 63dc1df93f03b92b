"""Prompt, answer, next prompt: what a model wrote comes back to it as it wrote it, through every API and dialect.

A client sends each answer back as it got it, with the results of its calls. Every prompt must then be, token for token,
the conversation so far: nothing lost, changed or moved. Reasoning stays between the calls of a turn, and is gone after
the answer that ends the turn; DeepSeek's template never shows it again.
"""

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from loaders.tokenizer import load_tokenizer
from tests.server.api_readers import APIS, post
from tests.server.conftest import ASSETS, FakeEngine, serve
from tests.server.scripted_model import deepseek_tokenizer
from tests.tables import rows

FUNCTIONS = [{"name": name, "parameters": {"type": "object"}} for name in ("f", "get_weather")]
SPELLED = ("<|end|>", "<|start|>assistant", "<|call|>", "<｜User｜>", "<｜tool▁calls▁begin｜>")
"""Control tokens as users and models may spell them: plain text, which must stay so."""


class Words(str):
    """What somebody says. It may be spelled like a control token, and is none."""

    __slots__ = ()


@dataclass
class Step:
    """What the model writes for one prompt: calls with their results, or else the answer that ends the turn."""

    thought: str
    text: str
    calls: list[tuple[str, str, str]]  # name, arguments, result
    speaks_first: bool = False  # before it thinks; templates show the thought first


@dataclass
class Turn:
    """A user's message and what the model does about it; the last step has no calls."""

    user: str
    steps: list[Step]


def _texts(low):
    """Texts without white space at the ends, which parsers may take for layout."""
    words = st.one_of(st.sampled_from(SPELLED), st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
    texts = st.lists(words, min_size=low, max_size=4).map(" ".join).map(str.strip)
    return texts.filter(lambda text: len(text) >= low).map(Words)


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | _texts(0),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_texts(1), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
_arguments = st.builds(
    lambda value, separators: json.dumps(value, ensure_ascii=False, separators=separators),
    st.dictionaries(_texts(1), _values, max_size=2),
    st.sampled_from([(", ", ": "), (",", ":")]),
)
_calls = st.lists(st.tuples(st.sampled_from(["f", "get_weather"]), _arguments, _texts(0)), min_size=1, max_size=2)
_turns = st.builds(
    lambda user, steps, answer: Turn(user, [*steps, answer]),
    _texts(1),
    st.lists(st.builds(Step, _texts(0), _texts(0), _calls, st.booleans()), max_size=2),
    st.builds(Step, _texts(0), _texts(1), st.just([])),
)


class Harmony:
    """Pieces of a conversation, each a control token or the text between two."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def written(self, step, _prompt_ids):
        """What the model writes: the header of its first message has begun already."""
        messages = self._messages(step)
        if step.speaks_first and step.calls and step.thought and step.text:
            messages[:2] = messages[1::-1]
        *others, last = messages
        # The model stops at a <|call|>, so calls that others follow end as messages do.
        pieces = [piece for message in others for piece in (*message[:-1], "<|end|>")]
        return [*pieces, *(last if step.calls else [*last[:-1], "<|return|>"])][2:]

    def prompt(self, turns):
        """The conversation up to where the model writes next."""
        pieces = []
        for number, turn in enumerate(turns):
            pieces += ["<|start|>", "user", "<|message|>", turn.user, "<|end|>"]
            for step in turn.steps:
                messages = self._messages(step)[bool(step.thought) and number < len(turns) - 1 :]
                pieces += [piece for message in messages for piece in message]
                for name, _, result in step.calls:
                    pieces += ["<|start|>", f"functions.{name} to=assistant", "<|channel|>", "commentary"]
                    pieces += ["<|message|>", result, "<|end|>"]
        return [*pieces, "<|start|>", "assistant"]

    def _messages(self, step):
        start = ["<|start|>", "assistant", "<|channel|>"]
        messages = [[*start, "analysis", "<|message|>", step.thought, "<|end|>"]] if step.thought else []
        if not step.calls:
            return [*messages, [*start, "final", "<|message|>", step.text, "<|end|>"]]
        if step.text:
            messages.append([*start, "commentary", "<|message|>", step.text, "<|end|>"])
        for name, arguments, _ in step.calls:
            header = [f"commentary to=functions.{name} ", "<|constrain|>", "json"]
            messages.append([*start, *header, "<|message|>", arguments, "<|call|>"])
        return messages


class DeepSeek:
    """The same for DeepSeek-V3.1, whose template shows no reasoning of earlier steps."""

    def __init__(self, tokenizer, *, thinks):
        self.tokenizer = tokenizer
        self._opening = ["<｜Assistant｜>", "<think>" if thinks else "</think>"]

    def written(self, step, prompt_ids):
        """What the model writes; it thinks if the prompt says so, but not after results, where nothing opens it."""
        thinks = prompt_ids[-1] == self.tokenizer.special_tokens["<think>"]
        return [*([step.thought, "</think>"] if thinks else []), *self._step(step)]

    def prompt(self, turns):
        """The conversation up to where the model writes next."""
        pieces = []
        for turn in turns:
            pieces += ["<｜User｜>", turn.user]
            for number, step in enumerate(turn.steps):
                pieces += ["<｜Assistant｜>", "</think>"] if number == 0 else []
                pieces += self._step(step)
                for _, _, result in step.calls:
                    pieces += ["<｜tool▁output▁begin｜>", result, "<｜tool▁output▁end｜>"]
        return pieces if turns[-1].steps else [*pieces, *self._opening]

    def _step(self, step):
        calls = []
        for name, arguments, _ in step.calls:
            calls += ["<｜tool▁call▁begin｜>", name, "<｜tool▁sep｜>", arguments, "<｜tool▁call▁end｜>"]
        calls = ["<｜tool▁calls▁begin｜>", *calls, "<｜tool▁calls▁end｜>"] if calls else []
        return [step.text, *calls, "<｜end▁of▁sentence｜>"]


def _ids(dialect, pieces):
    tokenizer = dialect.tokenizer
    ids = []
    for piece in pieces:
        is_control = piece in tokenizer.special_tokens and not isinstance(piece, Words)
        ids += [tokenizer.special_tokens[piece]] if is_control else tokenizer.encode(piece, allow_special=False)
    return ids


class ChatClient:
    """Sends chat's messages back."""

    field, fields = "messages", {"max_tokens": 2000}

    def answered(self, body):
        return [body["choices"][0]["message"]]

    def results(self, body, texts):
        calls = body["choices"][0]["message"]["tool_calls"]
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": text}
            for call, text in zip(calls, texts, strict=True)
        ]


class ResponsesClient:
    """Sends the items of an answer back."""

    field, fields = "input", {"max_output_tokens": 2000}

    def answered(self, body):
        return body["output"]

    def results(self, body, texts):
        calls = [item for item in body["output"] if item["type"] == "function_call"]
        return [
            {"type": "function_call_output", "call_id": call["call_id"], "output": text}
            for call, text in zip(calls, texts, strict=True)
        ]


class MessagesClient:
    """Sends the blocks of an answer back."""

    field, fields = "messages", {"max_tokens": 2000}

    def answered(self, body):
        return [{"role": "assistant", "content": body["content"]}]

    def results(self, body, texts):
        calls = [block for block in body["content"] if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": text}
            for call, text in zip(calls, texts, strict=True)
        ]
        return [{"role": "user", "content": results}]


CLIENTS = {"chat": ChatClient(), "responses": ResponsesClient(), "messages": MessagesClient()}


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    """For each dialect its service and a client of it."""
    folder = tmp_path_factory.mktemp("dialects")
    dialects = {
        "harmony": Harmony(load_tokenizer(ASSETS)),
        "deepseek": DeepSeek(deepseek_tokenizer(folder / "plain"), thinks=False),
        "deepseek, thinking": DeepSeek(deepseek_tokenizer(folder / "thinking", thinks=True), thinks=True),
    }
    with ExitStack() as stack:
        found = {}
        for name, dialect in dialects.items():
            service = stack.enter_context(serve(FakeEngine(), dialect.tokenizer))
            found[name] = dialect, service.engine, stack.enter_context(service.http())
        yield found


@rows("dialect", "harmony", "deepseek", "deepseek, thinking")
@rows("api", *APIS)
def test_the_model_gets_back_what_it_wrote(services, dialect, api):
    @settings(max_examples=12, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(st.lists(_turns, min_size=1, max_size=2))
    def run(turns):
        converse(*services[dialect], api, turns)

    run()


def converse(dialect, engine, http, api, turns):
    """Play a conversation and compare the prompt of every step with the conversation so far."""
    client, endpoint = CLIENTS[api], APIS[api]
    fields = {"tools": endpoint.tools(FUNCTIONS), **client.fields}
    engine.script = lambda request: _ids(dialect, dialect.written(step, request.prompt_ids))
    history, known, head = [], [], None
    for turn in turns:
        history.append({"role": "user", "content": turn.user})
        known.append(Turn(turn.user, []))
        for step in turn.steps:
            body = post(http, endpoint, {client.field: history, **fields}).json()
            prompt = engine.requests[-1].prompt_ids
            expected = _ids(dialect, dialect.prompt(known))
            head = prompt[: -len(expected)] if head is None else head
            assert dialect.tokenizer.decode(prompt) == dialect.tokenizer.decode([*head, *expected])
            assert prompt == [*head, *expected]
            history += client.answered(body)
            if step.calls:
                history += client.results(body, [result for _, _, result in step.calls])
            known[-1].steps.append(_as_sent_back(step, api))


def _as_sent_back(step, api):
    """Messages have a call's arguments as an object, so its text is written anew."""
    if api != "messages":
        return step
    rewritten = [(name, json.dumps(json.loads(text), ensure_ascii=False), result) for name, text, result in step.calls]
    return replace(step, calls=rewritten)
