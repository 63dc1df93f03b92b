"""`moe-serve chat` against a server whose answers the test writes; once in a real terminal."""

import asyncio
import io
import os
import pty
import signal
import sys
from contextlib import contextmanager, suppress

import pytest

from server import cli
from server.chat.command import printable
from tests.server.bench.fake_server import END, STREAM_HEAD, chunked, event, serve, whole
from tests.server.conftest import wait_until
from tests.server.service_process import ROOT
from tests.tables import rows


def delta(finish=None, **fields):
    return chunked(event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}))


def answering(*parts):
    async def answer(asked, writer):
        if asked.path.endswith("/models"):
            writer.write(whole({"data": [{"id": "fake"}]}))
        elif isinstance(parts[0], tuple):
            writer.write(whole(*parts[0]))
        else:
            writer.write(STREAM_HEAD + b"".join(parts))

    return answer


ANSWER = (
    delta(role="assistant"), delta(reasoning="hm, "), delta(reasoning_content="yes"), delta(content="Par"),
    delta("stop", content="is \x1b[31m"), chunked(event({"choices": [], "usage": {"completion_tokens": 4}})),
    chunked(event(b"[DONE]")), END,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _restore_signal():
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def chat(monkeypatch, capsys):
    def run(url, text, *flags):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        status = cli.main(["chat", "--base-url", url, *flags])
        return status, *capsys.readouterr()

    return run


def test_an_address_without_its_flag_is_explained(capsys):
    assert cli.main(["chat", "http://a:1"]) == cli.USAGE_ERROR
    assert "did you mean --base-url http://a:1?" in capsys.readouterr().err


def test_a_conversation_keeps_its_turns_until_reset(chat):
    with serve(answering(*ANSWER)) as server:
        said = chat(
            f"{server.url}/v1/", "one\ntwo\n/reset\nthree\n/system S\nfour\n/quit\nfive\n", "--temperature", "0"
        )
        assert said[::2] == (0, "")
        asked = [[(turn["role"], turn["content"]) for turn in post.body["messages"]] for post in server.posts]
        body = server.posts[0].body
    assert "hm, yes\n\nParis [31m\n" in said[1], "no escape sequence of a model reaches the terminal"
    first = [("user", "one"), ("assistant", "Paris \x1b[31m")]
    assert asked == [
        [("user", "one")], [*first, ("user", "two")], [("user", "three")], [("system", "S"), ("user", "four")]
    ]  # fmt: skip
    assert (body["model"], body["stream"], body["temperature"]) == ("fake", True, 0)
    assert "max_tokens" not in body


@rows(
    "parts, message",
    ([({"error": {"message": "too long"}}, 400)], "HTTP 400: too long"),
    ([("gone", 502)], 'HTTP 502: "gone"'),
    ([delta(content="Pa"), chunked(event({"error": {"message": "engine died"}})), END], "engine died"),
    ([delta(content="Pa"), END], "the server broke off its answer"),
    ([chunked(event([1])), END], "does not speak OpenAI's API"),
)
def test_an_error_is_told_and_the_next_question_asked(chat, parts, message):
    with serve(answering(*parts)) as server:
        status, _, err = chat(server.url, "one\ntwo\n")
        assert (status, len(server.posts)) == (1, 2)
    assert err.count(message) == 2


def test_a_server_that_leaves_in_mid_answer_is_not_taken_for_one_that_speaks_https(chat):
    async def answer(asked, writer):
        if asked.path.endswith("/models"):
            writer.write(whole({"data": [{"id": "fake"}]}))
        else:
            writer.write(STREAM_HEAD + delta(content="Pa"))
            await writer.drain()
            writer.close()

    with serve(answer) as server:
        status, out, err = chat(server.url, "one\n")
    assert (status, "Pa" in out) == (1, True)
    assert f"{server.url}/v1 broke off its answer: " in err
    assert "https" not in err


@rows("flags", [], ["--system", "\udcff"])
def test_a_question_that_is_no_text_is_not_blamed_on_the_server(monkeypatch, capsys, flags):
    stdin = io.TextIOWrapper(io.BytesIO(b"one\n\xff\xfe\ntwo\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    with serve(answering(*ANSWER)) as server:
        assert cli.main(["chat", "--base-url", server.url, *flags]) == 1
        assert len(server.posts) == (0 if flags else 2)
    err = capsys.readouterr().err
    assert err.count("the question, or the system prompt, is not UTF-8 text") == (3 if flags else 1)
    assert "OpenAI" not in err


def test_a_text_may_hold_what_python_takes_for_the_end_of_a_line(chat):
    text = '{"choices": [{"delta": {"content": "a\u2028b\x85c"}, "finish_reason": "stop"}]}'
    with serve(answering(chunked(event(text.encode())), chunked(event(b"[DONE]")), END)) as server:
        status, out, err = chat(server.url, "hi\n")
    assert (status, "a\u2028b" in out) == (0, True), err


def test_without_a_server_the_error_says_what_to_do(chat):
    status, out, err = chat("http://127.0.0.1:9", "hello\n")
    assert (status, out) == (1, "")
    assert "no server answers at http://127.0.0.1:9/v1" in err
    assert "start one with `moe-serve`" in err
    assert chat("ftp://x", "")[0] == 2


def test_control_characters_are_taken_out():
    assert printable("a\tb\nc\x1b]0;title\x07\x9b31m\r\u0000é") == "a\tb\nc]0;title31mé"


@contextmanager
def in_terminal(*flags):
    """The command in a terminal of its own: a function that types and waits until text is shown."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, "-m", "server", "chat", *flags], os.environ | {"TERM": "xterm"})
    os.set_blocking(terminal, False)
    shown = bytearray()

    def seen(text):
        with suppress(OSError):  # nothing to read yet, or the program has gone
            shown.extend(os.read(terminal, 1 << 16))
        return text in shown.decode(errors="replace")

    def type_and_see(typed, text):
        shown.clear()
        os.write(terminal, typed)
        wait_until(lambda: seen(text), 30)

    try:
        wait_until(lambda: seen("> "), 30)
        yield type_and_see
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def test_ctrl_c_stops_the_answer_and_not_the_program():
    async def answer(asked, writer):
        if asked.path.endswith("/models"):
            writer.write(whole({"data": [{"id": "fake"}]}))
        elif "endless" in asked.body["messages"][-1]["content"]:
            writer.write(STREAM_HEAD + delta(reasoning="thinking"))
            while not writer.is_closing():
                await asyncio.sleep(0.01)
                writer.write(delta(content="."))
                await writer.drain()
        else:
            writer.write(STREAM_HEAD + b"".join(ANSWER))

    with serve(answer) as server, in_terminal("--base-url", server.url) as type_and_see:
        type_and_see(b"endless\n", "\x1b[2mthinking\x1b[0m\r\n\r\n..")
        type_and_see(b"\x03", "(stopped)\r\n\x1b[0m> ")
        type_and_see(b"\x1b[A", "endless")  # the key up: readline has a history
        type_and_see(b"\x03", "Ctrl-D leaves\r\n\x1b[0m> ")
        type_and_see(b"next\n", "> ")
        type_and_see(b"\x04", "\n")
        turns = server.posts[-1].body["messages"]
        assert [turn["role"] for turn in turns] == ["user", "assistant", "user"], "what came before Ctrl-C is kept"
