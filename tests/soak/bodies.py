"""Request bodies of the soak test, good and bad, built once from a seed."""

import json
import random
from dataclasses import dataclass

MODEL, LEAVERS_MODEL = "soak", "leavers"
"""Two names of one model, so that tokens of clients that leave are counted apart: nobody knows how many they read."""

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_QUESTIONS = ("What is the capital of France?", "17 + 25 = ?", "Sort: 5 3 9", "Hello!", "What is the weather in Paris?")


@dataclass(frozen=True, slots=True)
class Post:
    """A request and the statuses that are right for it; a full queue (429) always is."""

    path: str
    content: bytes
    statuses: tuple[int, ...] = (200,)


def question(rng: random.Random, *, model: str = MODEL, max_tokens: int = 40, **fields: object) -> Post:
    """A chat or a raw completion that is answered."""
    settings = {"model": model, "max_tokens": rng.randint(1, max_tokens), "temperature": rng.choice([0, 0.8]), **fields}
    text = rng.choice(_QUESTIONS)
    if rng.random() < 0.5:
        return _post(CHAT, {"messages": [{"role": "user", "content": text}], **settings})
    return _post(COMPLETIONS, {"prompt": text, **settings})


def malformed(rng: random.Random) -> Post:
    """What clients get wrong."""
    user = {"role": "user", "content": "Hi"}
    wrong = [
        b"",
        b"{",
        b"[]",
        rng.randbytes(200),
        _json({"messages": []}),
        _json({"messages": [user], "n": 0}),
        _json({"messages": [user], "colour": "red"}),
        _json({"messages": [user], "max_tokens": 10**9}),
        _json({"messages": [user], "temperature": "hot"}),
        b'{"messages": ' + b"[" * 2000,
    ]
    return Post(CHAT, rng.choice(wrong), (400,))


def large() -> list[Post]:
    """Bodies of megabytes: G06, G80, G81, and good ones of a few hundred kilobytes."""
    ones = b",".join([b"1"] * 1_300_000)
    keys = b",".join(b'"k%d":1' % index for index in range(300_000))
    message = b'{"role":"user","content":"x"}'
    bad = [
        (CHAT, b'{"messages":[{"role":"assistant","tool_calls":[' + ones + b"]}]}"),
        (CHAT, b'{"messages":[' + message + b'],"modalities":[' + ones + b"]}"),
        (CHAT, b'{"messages":[' + message + b"]," + keys + b"}"),
        (CHAT, b'{"messages":[' + b",".join([b'{"role":1,"content":"x"}'] * 140_000) + b"]}"),
        (CHAT, b'{"messages":[' + b"[]," * 1_300_000 + b"[]]}"),
        ("/detokenize", b'{"tokens":[' + ones + b"]}"),
        (COMPLETIONS, _json({"model": MODEL, "prompt": " " * 1_000_000})),
        (CHAT, _json({"model": MODEL, "messages": [{"role": "user", "content": " " * 1_000_000}]})),
        (COMPLETIONS, b'{"prompt":[' + ones + b"]}"),
    ]
    good = [
        ("/tokenize", _json({"prompt": "The capital of France is Paris. " * 5000})),
        ("/detokenize", _json({"tokens": [5] * 16_000})),
    ]
    return [Post(*each, (400,)) for each in bad] + [Post(*each) for each in good]


def _post(path: str, body: object) -> Post:
    return Post(path, _json(body))


def _json(body: object) -> bytes:
    return json.dumps(body).encode()
