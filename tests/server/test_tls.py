"""Commands that ask a server: what they say of a certificate they do not trust, and of HTTP where HTTPS is spoken."""

import io
import signal
import ssl
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from evals.client import Client, ServerError
from server import cli
from server.tls import tls_failure
from tests.server.conftest import ANSWER, FakeEngine, serve
from tests.tables import rows

CERTIFICATE = Path(__file__).with_name("localhost.pem")
UNTRUSTED, PLAIN = "set the variable SSL_CERT_FILE to a file with the certificate", "if it serves plain HTTP, give"
CHAT, BENCH = ("chat", "--base-url"), ("bench", "--num-requests", "1", "--base-url")


@pytest.fixture(autouse=True)
def _without_input(monkeypatch):
    """A question-less chat; it takes the signal of Ctrl-C."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def https(tokenizer, harmony):
    with serve(FakeEngine(script=lambda _request: harmony(ANSWER)), tokenizer, ssl_certfile=CERTIFICATE) as service:
        yield service.url.replace("http:", "https:")


@pytest.fixture
def plain(tokenizer):
    with serve(FakeEngine(), tokenizer) as service:
        yield service.url


def test_an_untrusted_certificate_is_no_missing_server(https, monkeypatch, capsys):
    """`chat` said that no server answers, and to start one."""
    for command in (CHAT, BENCH):
        assert cli.main([*command, https]) in (1, 2)
        error = capsys.readouterr().err
        assert f"{https}" in error
        assert UNTRUSTED in error
        assert "no server answers" not in error
    with pytest.raises(ServerError, match="Set SSL_CERT_FILE to a file"):
        Client(base_url=f"{https}/v1").get("/models")
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    assert cli.main([*CHAT, https]) == 0
    assert cli.main([*BENCH, https]) == 0
    assert Client(base_url=f"{https}/v1").first_model()


def test_a_file_without_certificates_is_named(https, tmp_path, monkeypatch, capsys):
    """`chat` ended in a traceback, and `bench` said to set the variable that was set."""
    (tmp_path / "empty").write_text("")
    for file in (tmp_path / "empty", tmp_path / "missing"):
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        for command in (CHAT, BENCH):
            assert cli.main([*command, https]) in (1, 2)
            error = capsys.readouterr().err
            assert str(file) in error
            assert UNTRUSTED not in error
            assert error.count("\n") == 1


def test_the_other_scheme_is_named(https, plain, capsys):
    for command in (CHAT, BENCH):
        for url, words in (
            (https.replace("https:", "http:"), "; if it serves HTTPS, give an address with https://"),
            (plain.replace("http:", "https:"), PLAIN),
        ):
            assert cli.main([*command, url]) in (1, 2)
            assert words in capsys.readouterr().err
    with pytest.raises(ServerError, match="begin the URL with https://"):
        Client(base_url=https.replace("https:", "http:") + "/v1").get("/models")
    with pytest.raises(ServerError, match="begin the URL with http://"):
        Client(base_url=plain.replace("http:", "https:") + "/v1").get("/models")


@pytest.mark.parametrize("command", ["health", "experts"])
def test_the_flags_of_the_service_are_asked_for(https, plain, capsys, command):
    for url, flags, words in (
        (https, (), "; if the service has a certificate, give --ssl-certfile or its variable here, too\n"),
        (plain, ("--ssl-certfile", str(CERTIFICATE)), "; if the service has no certificate, leave out --ssl-certfile"),
    ):
        port = str(urlsplit(url).port)
        assert cli.main([command, "--port", port, *flags]) == 1
        assert words in "".join(capsys.readouterr())
    assert cli.main([command, "--port", "1"]) == 1
    assert "certificate" not in "".join(capsys.readouterr())


def refused(code, message):
    error = ssl.SSLCertVerificationError("certificate verify failed")
    error.verify_code, error.verify_message = code, message
    return error


@rows(
    "error, words",
    (refused(62, "Hostname mismatch"), "is for another address (Hostname mismatch): give the one that it names"),
    (refused(64, "IP address mismatch"), "is for another address (IP address mismatch)"),
    (refused(10, "certificate has expired"), "has expired: renew it"),
    (refused(18, "self-signed certificate"), UNTRUSTED),
    (ssl.SSLError(1, "wrong version"), PLAIN),
    (OSError(111, "Connection refused"), None),
)
def test_the_way_out_fits_the_reason(error, words):
    wrapped = ValueError("of a library")
    wrapped.__cause__ = error
    for each in (error, wrapped):
        told = tls_failure(each)
        assert told is None if words is None else words in told
