"""`python -m evals logits` and `perplexity`: the arithmetic, and both ways to ask the running service."""

import json
import math
import random
import sys
from pathlib import Path

import pytest

from evals import distributions
from evals.__main__ import main
from evals.client import Client
from evals.distributions import NUM_TOP, Place, Scores, difference, kl_lower_bound, perplexity, score
from evals.texts import Sequence, from_file, tokens_of
from tests.tables import rows

MISSING_FOLDER = "/dev/null/folder/file"
MODEL = "tiny-gpt-oss"


def logs(**probabilities: float) -> dict[str, float]:
    return {name: math.log(p) for name, p in probabilities.items()}


@rows(
    "first, second, nats",
    (logs(a=0.5, b=0.5), logs(a=0.5, b=0.5), 0.0),
    (logs(a=0.5, b=0.5), logs(a=0.25, b=0.75), 0.5 * math.log(2) + 0.5 * math.log(2 / 3)),
    (logs(a=0.5), logs(a=0.25), 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)),  # the rest is one bucket
    (logs(a=0.5, b=0.25), logs(a=0.5, c=0.25), 0.0),  # b is not known of the second: it is part of the rest
)
def test_a_divergence_counted_by_hand(first: dict[str, float], second: dict[str, float], nats: float) -> None:
    assert kl_lower_bound(first, second) == pytest.approx(nats, abs=1e-12)


def test_the_divergence_of_the_best_tokens_is_at_most_the_whole_one() -> None:
    draw = random.Random(3)
    for _ in range(200):
        p, q = ([draw.expovariate(1) ** 3 for _ in range(60)] for _ in range(2))
        p, q = ([value / sum(values) for value in values] for values in (p, q))
        whole = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        best = [
            {str(i): math.log(values[i]) for i in sorted(range(60), key=values.__getitem__)[-NUM_TOP:]}
            for values in (p, q)
        ]
        assert 0 <= kl_lower_bound(*best) <= whole + 1e-9


def test_figures_of_two_servers() -> None:
    places = [Place(logprob=math.log(0.5), top=logs(a=0.5, b=0.4)), Place(logprob=math.log(0.25), top=logs(a=0.75))]
    moved = [Place(logprob=math.log(0.4), top=logs(a=0.4, b=0.5)), places[1]]
    first, second = (Scores(model="m", sequences=[Sequence(ids=[1, 2, 3])], places=[one]) for one in (places, moved))
    found = difference(first, second)
    assert (found["tokens"], found["top1_agreement"]) == (2, 0.5)
    assert found["logprob_difference"]["max"] == pytest.approx(math.log(0.5 / 0.4), rel=1e-3)
    assert found["perplexity"][0] == pytest.approx(8**0.5, rel=1e-5)
    other = Scores(model="m", sequences=[Sequence(ids=[1, 2, 4])], places=[places])
    with pytest.raises(ValueError, match="different sequences"):
        difference(first, other)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["evals", *arguments])
    return main()


def test_a_server_agrees_with_itself_and_with_scores_that_were_kept(
    bundled_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base, kept = f"{bundled_url}/v1", str(tmp_path / "kept.json")
    assert run(monkeypatch, "logits", "--a", base, "--questions", "6", "--save", kept) == 0
    assert run(monkeypatch, "logits", "--a", kept, "--b", base) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["tokens"] > 100
    assert result["top1_agreement"] == 1.0
    assert result["kl_lower_bound"]["max"] < 1e-4
    assert 1 < result["perplexity"][0] < 1.2  # of its own greedy answers
    sequences = Scores.read(Path(kept)).sequences
    assert len(sequences) == 6 + 1
    assert len(sequences[-1].ids) > 128, "one is longer than the sliding window"


def test_both_ways_to_ask_give_the_same(bundled_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    client = Client(base_url=f"{bundled_url}/v1", model=MODEL)
    (tmp_path / "text").write_text("The capital of France is Paris. Water boils at 100 degrees.")
    pieces, _ = from_file(client, tmp_path / "text", 12)
    assert all(len(piece.ids) == 12 for piece in pieces[:-1])
    by_id = score(client, pieces, 2)
    get = Client.get

    def without(self: Client, path: str, body: dict | None = None) -> object:
        """A server that knows no prompt_logprobs and ignores the field."""
        return get(self, path, None if body is None else {k: v for k, v in body.items() if k != "prompt_logprobs"})

    monkeypatch.setattr(Client, "get", without)
    by_text = score(client, pieces, 2)
    assert perplexity(by_text) == pytest.approx(perplexity(by_id), rel=1e-5)
    assert [len(places) for places in by_text.places] == [len(piece.ids) - 1 for piece in pieces]
    assert distributions.difference(by_text, by_text)["top1_agreement"] == 1.0


@rows("text", b"What is the capital of France?", b"What is the\r\ncapital of\r\nit all")
def test_perplexity_of_a_text(
    bundled_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: bytes
) -> None:
    (tmp_path / "text").write_bytes(text)
    assert run(monkeypatch, "perplexity", "--base-url", f"{bundled_url}/v1", "--text", str(tmp_path / "text")) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    nats = math.log(result["perplexity"]) * result["tokens"]
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(text), rel=1e-3)
    client = Client(base_url=f"{bundled_url}/v1", model=MODEL)
    assert result["tokens"] == len(tokens_of(client, text.decode())) - 1, "the text is scored as it is"


@rows(
    "arguments, words",
    (["--a", "http://127.0.0.1:9/v1"], "give --b URL"),
    (["--a", "http://127.0.0.1:9/v1", "--b", "http://127.0.0.1:9/v1"], "cannot be reached"),
    (["--a", "KEPT", "--b", "http://127.0.0.1:9/v1"], "does not hold scores"),
    (["--a", "http://127.0.0.1:9/v1", "--save", MISSING_FOLDER], f"--save {MISSING_FOLDER}: its folder cannot be made"),
)
def test_what_cannot_be_compared_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str],
    words: str,
) -> None:  # fmt: skip
    kept = tmp_path / "kept"
    kept.write_text("{}")
    assert run(monkeypatch, "logits", *[str(kept) if word == "KEPT" else word for word in arguments]) == 2
    assert words in capsys.readouterr().err


def test_more_questions_than_there_are_names_the_flag(
    bundled_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "perplexity", "--base-url", bundled_url, "--questions", "100000") == 2
    assert "--questions is 100000" in capsys.readouterr().err


@rows("text, window, words", ("a", 1, "--window is 1"), ("", 8, "has 0 tokens"), (b"\xff", 8, "is not UTF-8 text"))
def test_texts_that_cannot_be_scored_are_named(
    bundled_url: str, tmp_path: Path, text: str | bytes, window: int, words: str
) -> None:
    (tmp_path / "text").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=words):
        from_file(Client(base_url=f"{bundled_url}/v1", model=MODEL), tmp_path / "text", window)
