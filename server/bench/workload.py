"""`Workload`: the body of request number N, the same for every client process and every run with the same seed."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from server.bench.config import LOWEST_TOKEN_ID, BenchConfig
from server.bench.errors import BenchError

PATHS = {"completions": "/completions", "chat": "/chat/completions"}
# Common words, which most vocabularies hold as one token each.
_WORD_LIST = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body back parent"
)
_WORDS = _WORD_LIST.split()
_MAX_ANSWER = "max_tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """What the server takes, found out by `probe`.

    A text of `words_per_token * n - extra_words` words has about `n` tokens, the chat template's included.
    """

    model: str
    stream_options: dict[str, bool] | None
    takes_ids: bool
    words_per_token: float = 1.0
    extra_words: float = 0.0
    server_version: str | None = None

    def num_words(self, num_tokens: int) -> int:
        """Words that make a prompt of about this many tokens."""
        return max(1, round(num_tokens * self.words_per_token - self.extra_words))


class Workload:
    """Makes request bodies. The numbers of warm-up requests are negative."""

    def __init__(self, config: BenchConfig, accepted: Accepted) -> None:
        """Raises BenchError for a data set that cannot be read."""
        self._config = config
        self._accepted = accepted
        self._rows = None if config.dataset is None else read_dataset(config.dataset, config.endpoint)
        self._order: list[int] = []
        if self._rows is not None:
            self._order = random.Random(config.seed).sample(range(len(self._rows)), len(self._rows))

    def body(self, number: int) -> bytes:
        """The JSON of request `number`."""
        config = self._config
        draw = random.Random(f"{config.seed} {number}")
        num_answer_tokens = draw.randint(config.answer_tokens.low, config.answer_tokens.high)
        if self._rows is None:
            num_tokens = draw.randint(config.prompt_tokens.low, config.prompt_tokens.high)
            row = random_prompt(draw, config, self._accepted, num_tokens)
        else:
            row = self._rows[self._order[number % len(self._order)]]
        fields = {**request_fields(config, self._accepted.model, self._accepted.stream_options), **config.extra_body}
        return orjson.dumps({_MAX_ANSWER: num_answer_tokens} | fields | row)


def request_fields(config: BenchConfig, model: str, stream_options: dict[str, bool] | None) -> dict[str, Any]:
    """What every request of a run says."""
    fields: dict[str, Any] = {"model": model, "stream": True}
    if stream_options is not None:
        fields["stream_options"] = stream_options
    if config.ignore_eos:
        fields["ignore_eos"] = True
    return fields


def random_prompt(draw: random.Random, config: BenchConfig, accepted: Accepted, num_tokens: int) -> dict[str, Any]:
    """`prompt` or `messages` of `num_tokens` tokens: exact as ids, about right as text."""
    if accepted.takes_ids:
        return {"prompt": draw.choices(range(LOWEST_TOKEN_ID, config.vocab_size), k=num_tokens)}
    return as_prompt(config.endpoint, random_text(draw, accepted.num_words(num_tokens)))


def random_text(draw: random.Random, num_words: int) -> str:
    """So many words in no order."""
    return " ".join(draw.choices(_WORDS, k=num_words))


def as_prompt(endpoint: str, text: str) -> dict[str, Any]:
    """The fields that carry a text."""
    return {"prompt": text} if endpoint == "completions" else {"messages": [{"role": "user", "content": text}]}


def read_dataset(path: Path, endpoint: str) -> Sequence[dict[str, Any]]:
    """Rows of a JSON lines file, as request fields: `prompt` or `messages`, and `max_tokens` where the line has it.

    Raises:
        BenchError: the file cannot be read, a line is not such an object, or it does not go with the endpoint.
    """
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # U+2028 may stand in a JSON string, and ends no line
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--dataset: {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(_row(sendable_json(line), endpoint))
            except (ValueError, BenchError) as error:
                raise BenchError(f"--dataset: {path} line {number}: {error}") from error
    if not rows:
        raise BenchError(f"--dataset: {path} has no lines")
    return rows


def sendable_json(text: str) -> Any:
    """JSON that a request can carry unchanged.

    Raises:
        ValueError: not JSON, NaN, an integer of more than 64 bits, half of a surrogate pair, or nested too deeply.
    """
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
        orjson.dumps(found)
    except orjson.JSONEncodeError as error:
        raise ValueError(str(error)) from error
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _row(line: Any, endpoint: str) -> dict[str, Any]:
    if not isinstance(line, dict) or ("prompt" in line) == ("messages" in line):
        raise BenchError("each line must be a JSON object with either prompt or messages")
    limit = {_MAX_ANSWER: line[_MAX_ANSWER]} if _MAX_ANSWER in line else {}
    if "messages" in line:
        if endpoint == "completions":
            raise BenchError("messages go to --endpoint chat")
        return {"messages": line["messages"], **limit}
    if isinstance(line["prompt"], str):
        return as_prompt(endpoint, line["prompt"]) | limit
    if endpoint == "chat":
        raise BenchError("a prompt of token ids goes to --endpoint completions")
    return {"prompt": line["prompt"], **limit}
