"""Scripts of the page that no click reaches in every case: streams cut anywhere, tokens that share a character."""

import pytest

from tests.tables import rows

pytestmark = pytest.mark.browser


@rows(
    "stream, events",
    ("data: a\n\ndata: b\n\n", ["a", "b"]),
    ("data: a\r\n\r\ndata:b\r\n\r\n", ["a", "b"]),
    ("data: one\ndata: two\n\n", ["one\ntwo"]),
    (": comment\nevent: x\nid: 3\ndata: 日本 😀\n\n", ["日本 😀"]),
    ("data: unfinished", []),
)
def test_events_wherever_the_stream_is_cut(stream, events, service, open_page):
    page = open_page(service.url)
    script = """async ([stream, size]) => {
        const { eventsOf } = await import("./page/sse.js");
        const bytes = new TextEncoder().encode(stream), found = [];
        const body = new ReadableStream({ start(control) {
            for (let at = 0; at < bytes.length; at += size) control.enqueue(bytes.slice(at, at + size));
            control.close();
        } });
        for await (const event of eventsOf(body)) found.push(event);
        return found;
    }"""
    for size in (1, 2, 3, 7, 1000):
        assert page.evaluate(script, [stream, size]) == events, size


@rows(
    "pushes, pieces",
    ([["ab c", ["ab", " c"]]], [["ab", 0], [" c", 1]]),
    ([["a", ["ab"]], ["b c", [" c"]]], [["ab", 0], [" c", 1]]),  # text is held back until its token is complete
    ([["", ["ab"]], ["ab", []]], [["ab", 0]]),
    ([["é!", [[195], [169], "!"]]], [["é", 0], ["!", 1]]),  # two tokens are one character
    ([["xy", ["z"]], ["ab", ["ab"]]], [["xy", None], ["ab", 1]]),  # the service changed the text
    ([["plain", []]], [["plain", None]]),
)
def test_each_part_of_the_text_has_its_token(pushes, pieces, service, open_page):
    page = open_page(service.url)
    script = """async (pushes) => {
        const { TokenAligner } = await import("./page/tokens.js");
        const aligner = new TokenAligner(), bytes = (token) => [...new TextEncoder().encode(token)];
        const entry = (token) => Array.isArray(token) ? { token: "", bytes: token, logprob: 0 }
            : { token, bytes: bytes(token), logprob: 0 };
        const pieces = pushes.flatMap(([text, tokens]) => aligner.push(text, tokens.map(entry)));
        return [...pieces, ...aligner.end()].map(({ text, token }) => [text, token]);
    }"""
    assert page.evaluate(script, pushes) == pieces
