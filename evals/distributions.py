"""What a server says of every next token of given sequences, and how far two servers differ there."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evals.client import Client, ServerError, in_parallel, reading
from evals.texts import Sequence

NUM_TOP = 20
_LEAST = 1e-6  # of a probability: below it the sum of rounded ones says nothing


@dataclass(frozen=True, kw_only=True)
class Place:
    """One place of a sequence: log-probability of the token that stands there, and of the server's 20 best by name.

    Names are token ids; of a server that gives no ids, the tokens' texts.
    """

    logprob: float
    top: dict[str, float]

    @property
    def best(self) -> str:
        """The likeliest token."""
        return max(self.top, key=self.top.__getitem__)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The places of every sequence, from its `first` on."""

    model: str
    sequences: list[Sequence]
    places: list[list[Place]]

    def write(self, path: Path) -> None:
        """As JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Scores:
        """What `write` wrote. Raises ValueError for another file, OSError if it cannot be read."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            places = [[Place(**place) for place in sequence] for sequence in content["places"]]
            sequences = [Sequence(**sequence) for sequence in content["sequences"]]
            return cls(model=content["model"], sequences=sequences, places=places)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} does not hold scores that `evals logits --save` wrote: {error!r}") from error


def score(client: Client, sequences: list[Sequence], concurrency: int) -> Scores:
    """Ask a server for the places of every sequence. Raises ServerError, also if there are none."""
    places = list(in_parallel(lambda one: _places(client, one.ids)[one.first - 1 :], sequences, concurrency))
    if not any(places):
        raise ServerError(f"{client.base_url}: the sequences have no token to score")
    return Scores(model=client.model, sequences=sequences, places=places)


def _places(client: Client, ids: list[int]) -> list[Place]:
    """Of every token but the first."""
    body = {"model": client.model, "prompt": ids, "max_tokens": 1, "temperature": 0}
    with reading(f"{client.base_url}/completions"):
        choice = client.get("/completions", body | {"prompt_logprobs": NUM_TOP})["choices"][0]
        if choice.get("prompt_logprobs"):
            found = [
                Place(
                    logprob=entries[str(token)]["logprob"],
                    top={name: entry["logprob"] for name, entry in entries.items()},
                )
                for token, entries in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
            ]
        else:
            found = _echoed(client, body, len(ids))
    if not all(math.isfinite(place.logprob) for place in found):
        raise ServerError(f"{client.base_url} gives a log-probability that is no finite number")
    return found


def _echoed(client: Client, body: dict[str, Any], count: int) -> list[Place]:
    """The same by `echo`, where tokens have texts for names; of several with one text the last one counts."""
    choice = client.get("/completions", body | {"echo": True, "logprobs": NUM_TOP})["choices"][0]
    logprobs = choice.get("logprobs")
    if not logprobs or len(logprobs["token_logprobs"]) < count:
        raise ServerError(f"{client.base_url} gives neither prompt_logprobs nor an echo with logprobs")
    return [
        Place(logprob=logprob, top=dict(top or {}) | {token: logprob})
        for token, logprob, top in zip(
            *(logprobs[name][1:count] for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True
        )
    ]


def kl_lower_bound(first: dict[str, float], second: dict[str, float]) -> float:
    """KL divergence from `first` to `second`, in nats, of the first's best tokens and one bucket for all the rest.

    A token that the second server did not list goes into the bucket too, so both sides are distributions over the same
    classes. To merge tokens can only lower a divergence: the true one, over the whole vocabulary, is at least this.
    """
    best = sorted(first, key=first.__getitem__, reverse=True)[:NUM_TOP]
    shared = [name for name in best if name in second]
    p = [math.exp(first[name]) for name in shared]
    divergence = sum(share * (first[name] - second[name]) for share, name in zip(p, shared, strict=True))
    rest_p, rest_q = 1 - math.fsum(p), 1 - math.fsum(math.exp(second[name]) for name in shared)
    if rest_p > _LEAST:
        divergence += rest_p * math.log(rest_p / max(rest_q, _LEAST))
    return max(0.0, divergence)


def perplexity(scores: Scores) -> float:
    """Of the tokens that stand in the sequences."""
    logprobs = [place.logprob for places in scores.places for place in places]
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def difference(first: Scores, second: Scores) -> dict[str, Any]:
    """How two servers differ over the same sequences.

    Raises:
        ValueError: the sequences differ.
    """
    if first.sequences != second.sequences:
        raise ValueError("the scores are of different sequences: let one server score those of the other")
    pairs = [
        pair for one, other in zip(first.places, second.places, strict=True) for pair in zip(one, other, strict=True)
    ]
    divergences = sorted(kl_lower_bound(one.top, other.top) for one, other in pairs)
    moved = sorted(abs(other.logprob - one.logprob) for one, other in pairs)
    return {
        "tokens": len(pairs),
        "top1_agreement": round(sum(one.best == other.best for one, other in pairs) / len(pairs), 5),
        "kl_lower_bound": _figures(divergences),
        "logprob_difference": _figures(moved),
        "perplexity": [round(perplexity(scores), 5) for scores in (first, second)],
    }


def _figures(ordered: list[float]) -> dict[str, float]:
    """Mean, 99th percentile and largest of sorted numbers."""
    place = min(len(ordered) - 1, len(ordered) * 99 // 100)
    return {
        name: float(f"{value:.4g}")
        for name, value in (("mean", math.fsum(ordered) / len(ordered)), ("p99", ordered[place]), ("max", ordered[-1]))
    }
