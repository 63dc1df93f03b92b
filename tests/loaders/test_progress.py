"""Progress: a log line per 5 % where there is no terminal, a bar where there is one."""

import io
import logging

import pytest

from loaders.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_line_per_five_percent(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    with caplog.at_level(logging.INFO, "loaders.progress"), Progress("Loading", 400, stream=stream) as progress:
        for _ in range(400):
            progress.advance()
    percents = [int(record.message.split()[1]) for record in caplog.records]
    assert percents == list(range(5, 101, 5))
    assert caplog.records[0].message.startswith("Loading: 5 % (")
    assert stream.getvalue() == ""


def test_large_steps_log_once_each(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "loaders.progress"), Progress("Loading", 10, stream=io.StringIO()) as progress:
        progress.advance(7)
        progress.advance(3)
    assert [int(record.message.split()[1]) for record in caplog.records] == [70, 100]


def test_nothing_to_do_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "loaders.progress"), Progress("Loading", 0, stream=io.StringIO()) as progress:
        progress.advance(0)
    assert not caplog.records


def test_a_terminal_gets_a_bar_and_no_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with caplog.at_level(logging.INFO, "loaders.progress"), Progress("Loading", 4, stream=stream) as progress:
        for _ in range(4):
            progress.advance()
    assert "Loading" in stream.getvalue()
    assert "100 %" in stream.getvalue()
    assert not caplog.records
