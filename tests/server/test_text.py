"""Incremental UTF-8 and stop strings: the result never depends on how the input was cut (B16, B17)."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from server.detokenizer import TextStream
from server.stops import StopMatcher
from tests.tables import rows


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.binary(max_size=40) | st.text(max_size=20).map(str.encode), st.lists(st.integers(0, 40), max_size=10))
def test_any_cut_of_bytes_gives_the_same_text(data, cuts):
    stream = TextStream()
    text = "".join(stream.feed(piece) for piece in pieces_of(data, cuts)) + stream.flush()
    assert text == data.decode("utf-8", errors="replace")


def test_only_whole_characters_come_out_and_one_for_a_broken_end():
    stream = TextStream()
    assert [stream.feed(bytes([byte])) for byte in "é€".encode()] == ["", "é", "", "", "€"]
    stream = TextStream()
    assert stream.feed(b"a\xe2\x82", 0) + stream.flush() == "a\ufffd"
    assert [token.text for token in stream.take(2)] == ["a\ufffd"]


@given(st.text(max_size=20), st.lists(st.integers(0, 60), max_size=10), st.lists(st.integers(0, 20), max_size=4))
def test_tokens_come_once_in_order_and_their_bytes_are_the_text(text, cuts, looks):
    data = text.encode()
    stream = TextStream()
    for position, piece in enumerate(pieces_of(data, cuts)):
        stream.feed(piece, position)
    stream.flush()
    taken = []
    for num_chars in sorted(min(look, len(text)) for look in looks):
        taken += stream.take(num_chars)
        shown = b"".join(token.data for token in taken)
        assert text[:num_chars].encode().startswith(shown)
    taken += stream.cut(len(text))
    assert b"".join(token.data for token in taken) == data
    assert "".join(token.text for token in taken) == text
    assert [token.position for token in taken] == list(range(len(cuts) + 1))


@given(st.text(alphabet="aé€😀", max_size=12), st.lists(st.integers(0, 40), max_size=8), st.integers(0, 12))
def test_a_cut_shortens_the_token_it_divides(text, cuts, num_chars):
    stream = TextStream()
    for position, piece in enumerate(pieces_of(text.encode(), cuts)):
        stream.feed(piece, position)
    taken = stream.cut(min(num_chars, len(text)))
    assert b"".join(token.data for token in taken) == text[:num_chars].encode()


def run(text: str, stops: list[str], cuts: list[int]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown = [matcher.feed(text[a:b]) for a, b in pairwise(edges)]
    return [*shown, matcher.flush()], matcher.matched


@given(
    st.text(alphabet="ab\n", max_size=30),
    st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 30), max_size=10),
)
def test_any_cut_of_text_stops_at_the_same_place(text, stops, cuts):
    shown, matched = run(text, stops, cuts)
    one_by_one, matched_then = run(text, stops, list(range(30)))
    assert ("".join(shown), matched) == ("".join(one_by_one), matched_then)
    if matched is None:
        assert "".join(shown) == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith("".join(shown) + matched)


def test_nothing_of_a_stop_string_is_shown_and_all_else_at_once():
    matcher = StopMatcher(["DEFGHIJ"])
    assert [matcher.feed(part) for part in ("ABC", "DEF", "G", "HI", "J", "K")] == ["ABC", "", "", "", "", ""]
    assert matcher.matched == "DEFGHIJ"
    matcher = StopMatcher(["END", "\n\n"])
    assert [matcher.feed(part) for part in ("a", "EN", "E", "x", "\n", "b")] == ["a", "", "EN", "Ex", "", "\nb"]


@rows("stops", [], ["zzz"])
def test_without_a_match_flush_gives_the_rest(stops):
    matcher = StopMatcher(stops)
    assert matcher.feed("az") + matcher.flush() == "az"
