"""`moe-serve health`: finds the service by its settings. G61: the image's check follows the port."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from engine.config import EngineConfig
from server import cli
from server.config import ServerConfig
from server.errors import SettingError
from server.health import health
from server.settings import settings_of
from tests.tables import rows

SETTINGS = settings_of(ServerConfig, EngineConfig)


class Service(BaseHTTPRequestHandler):
    """Answers /health/live with the status it is told."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health/live" else 404)
        self.end_headers()
        self.wfile.write(b"told")

    def log_message(self, format: str, *args: object) -> None:
        """No lines on standard error."""


@pytest.fixture
def port() -> Iterator[int]:
    """Of a running service."""
    with HTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def started_with(folder: Path, *words: str) -> Path:
    """A /proc where process 1 has this command line."""
    (folder / "1").mkdir()
    (folder / "1" / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
    return folder


def test_alive_dead_and_absent(port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a proxy is not asked for an address of this machine
    flags = ["health", "--port", str(port)]
    assert cli.main(flags) == 0
    assert capsys.readouterr().out == "told\n"
    monkeypatch.setattr(Service, "status", 503)
    assert cli.main(flags) == 1
    assert cli.main(["health", "--port", "1"]) == 1
    assert "no answer from 127.0.0.1 port 1: " in capsys.readouterr().out


@rows(
    "words, environ",
    (["/usr/bin/tini", "--", "moe-serve", "--port", "PORT", "--max-num-seqs", "4"], {"MOE_SERVE_PORT": "1"}),
    (["/opt/bin/python3", "/opt/bin/moe-serve", "--host", "0.0.0.0", "--port", "PORT"], {}),
    (["/usr/bin/tini", "--", "moe-serve"], {"MOE_SERVE_PORT": "PORT", "MOE_SERVE_HOST": "0.0.0.0"}),
    (["/usr/bin/python3", "-I", "-m", "server", "--port", "PORT"], {"MOE_SERVE_PORT": "1"}),
    (["/sbin/init", "--port", "1"], {"MOE_SERVE_PORT": "PORT"}),
    ([], {"MOE_SERVE_PORT": "PORT"}),
)
def test_g61_the_image_asks_the_port_of_process_1(
    port: int, tmp_path: Path, words: list[str], environ: dict[str, str]
) -> None:
    proc = started_with(tmp_path, *(word.replace("PORT", str(port)) for word in words))
    variables = {name: text.replace("PORT", str(port)) for name, text in environ.items()}
    assert health(["--of-pid", "1"], "moe-serve", SETTINGS, variables, proc) == 0


def test_g61_a_config_file_of_process_1_counts(port: int, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(f"port: {port}\n")
    proc = started_with(tmp_path, "tini", "--", "moe-serve", "--config", str(tmp_path / "settings.yaml"))
    assert health(["--of-pid", "1"], "moe-serve", SETTINGS, {}, proc) == 0


@rows("words", ["--config", "settings.yaml"], ["--config=settings.yaml"])
def test_a_config_file_is_found_in_the_folder_of_the_process(port: int, tmp_path: Path, words: list[str]) -> None:
    proc = started_with(tmp_path, "moe-serve", *words)
    (proc / "1" / "cwd").mkdir()
    (proc / "1" / "cwd" / "settings.yaml").write_text(f"port: {port}\n")
    assert health(["--of-pid", "1"], "moe-serve", SETTINGS, {}, proc) == 0


def test_a_process_that_is_gone_leaves_the_variables(port: int, tmp_path: Path) -> None:
    assert health(["--of-pid", "1"], "moe-serve", SETTINGS, {"MOE_SERVE_PORT": str(port)}, tmp_path) == 0


def test_no_answer_says_that_the_flags_are_of_no_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert health(["--of-pid", "7"], "moe-serve", SETTINGS, {"MOE_SERVE_PORT": "1"}, tmp_path) == 1
    assert "--of-pid: process 7 is not moe-serve" in capsys.readouterr().out
    assert health(["--of-pid", "1"], "moe-serve", SETTINGS, {}, started_with(tmp_path, "moe-serve", "--port", "1")) == 1
    assert "--of-pid" not in capsys.readouterr().out


def test_wrong_flags_and_a_free_port_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="unrecognized arguments: --prot"):
        health(["--prot", "1"], "moe-serve", SETTINGS, {})
    with pytest.raises(SettingError, match="--port: 0 lets the service pick a free port"):
        health(["--of-pid", "1"], "moe-serve", SETTINGS, {}, started_with(tmp_path, "moe-serve", "--port", "0"))


def test_what_kubernetes_sets_for_a_service_of_this_name_is_no_port(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_SERVE_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("MOE_SERVE_SERVICE_PORT", "80")
    monkeypatch.setenv("MOE_SERVE_PORT", "tcp://10.0.0.1:80")
    assert cli.main(["health", "--port", str(port)]) == 0
