"""Tokens by expert as operators see them: /expert_load, /metrics, and `moe-serve experts`."""

import numpy as np
import pytest

from engine.expert_file import read_load
from engine.types import ExpertLoad
from server import cli
from tests.server.conftest import MODEL, FakeEngine, serve
from tests.server.test_keys import CERTIFICATE
from tests.tables import rows


def load_of(*tokens, num_moves=0):
    return ExpertLoad(
        layers=[3 + index for index in range(len(tokens))], num_experts=len(tokens[0]),
        counts=np.array(tokens).astype("<i8").tobytes(), rank_ratios=[1.25] * len(tokens), num_moves=num_moves,
    )  # fmt: skip


LOAD = load_of([10, 70, 0, 20, 0, 0], [0] * 6, num_moves=7)


def port_of(service):
    return service.url.rpartition(":")[2]


def test_the_route_and_the_series_are_bounded_by_the_layers(service, monkeypatch):
    with service.http() as http:
        assert http.get("/expert_load").json()["layers"] == []
        assert "serve_expert" not in http.get("/metrics").text
        monkeypatch.setattr(service.engine, "expert_load", LOAD, raising=False)
        body = http.get("/expert_load").json()
        assert (body["models"], body["layers"][0]) == ([MODEL], {"layer": 3, "tokens": [10, 70, 0, 20, 0, 0]})
        series = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if "serve_expert" in line)
    assert float(series['moe_serve_expert_max_over_mean{layer="3"}']) == pytest.approx(4.2)
    assert float(series['moe_serve_expert_max_over_mean{layer="4"}']) == 1.0
    assert series['moe_serve_expert_rank_max_over_mean{layer="3"}'] == "1.25"
    busiest = [series[f'moe_serve_expert_busiest{{layer="3",place="{place}"}}'] for place in range(1, 5)]
    assert busiest == ["1.0", "3.0", "0.0", "2.0"]
    assert series['moe_serve_expert_busiest_share{layer="3",place="1"}'] == "0.7"
    assert series["moe_serve_expert_moves_total"] == "7.0"
    assert sum(name.startswith("moe_serve_expert") for name in series) == 2 * (3 + 2 * 4) + 1


def test_a_record_is_what_the_next_start_reads(service, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(service.engine, "expert_load", LOAD, raising=False)
    file = tmp_path / "load.json"
    assert cli.main(["experts", "--record", str(file), "--port", port_of(service)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "layer 3: busiest expert 4.20 x mean; 1 (70.0%), 3 (20.0%), 0 (10.0%), 2 (0.0%)", "layer 4: no tokens"
    ]  # fmt: skip
    assert read_load(file) == ((10, 70, 0, 20, 0, 0), (0,) * 6)


def test_seconds_count_between_two_answers(service, monkeypatch, tmp_path):
    monkeypatch.setattr(service.engine, "expert_load", LOAD, raising=False)

    def wait(seconds):
        assert seconds == 0.5
        service.engine.expert_load = load_of([11, 70, 4, 20, 0, 0], [1] * 6)

    monkeypatch.setattr("server.experts.time.sleep", wait)
    file = tmp_path / "load.json"
    flags = ["--record", str(file), "--seconds", "0.5", "--port", port_of(service)]
    assert cli.main(["experts", *flags]) == 0
    assert read_load(file) == ((1, 0, 4, 0, 0, 0), (1,) * 6)


@rows("command", "experts", "health")
def test_a_host_that_cannot_be_one_is_refused(command, capsys):
    assert cli.main([command, "--host", "a..b"]) == cli.USAGE_ERROR
    assert "--host: 'a..b' is not an address" in capsys.readouterr().err


@rows("seconds", "inf", "nan", "-1", "1e9")
def test_seconds_out_of_range_are_refused(seconds, capsys):
    assert cli.main(["experts", "--seconds", seconds]) == cli.USAGE_ERROR
    assert "it must lie between 0 and 1,000,000" in capsys.readouterr().err


@rows(
    "status, body, words",
    (200, b'{"a": 1}', "does not answer /expert_load as moe-serve does"),
    (200, b"<html>", "does not answer /expert_load as moe-serve does"),
    (200, b'{"models": ["\xff"]}', "does not answer /expert_load as moe-serve does"),
    (404, b"\xff", "answers /expert_load with status 404: \ufffd"),
)
def test_another_server_is_named(status, body, words, monkeypatch, capsys):
    monkeypatch.setattr("server.own_service.OwnService.get", lambda *_args, **_rest: (status, body))
    assert cli.main(["experts"]) == cli.USAGE_ERROR
    assert words in capsys.readouterr().err


def test_a_key_is_sent(tokenizer, monkeypatch, capsys):
    with serve(FakeEngine(), tokenizer, api_key="secret") as service:
        monkeypatch.setattr(service.engine, "expert_load", LOAD, raising=False)
        assert cli.main(["experts", "--port", port_of(service)]) == cli.USAGE_ERROR
        assert "status 401" in capsys.readouterr().err
        monkeypatch.setenv("MOE_SERVE_API_KEY", "secret")
        assert cli.main(["experts", "--port", port_of(service)]) == 0


def test_the_admin_key_is_sent_if_there_is_one(tokenizer, monkeypatch, capsys, tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    with serve(FakeEngine(), tokenizer, api_key="one,two", admin_key="root") as service:
        monkeypatch.setattr(service.engine, "expert_load", LOAD, raising=False)
        flags = ["experts", "--port", port_of(service), "--api-key-file", str(file)]
        assert cli.main(flags) == cli.USAGE_ERROR
        assert "needs the admin key" in capsys.readouterr().err
        assert cli.main([*flags, "--admin-key", "root"]) == 0
    with serve(FakeEngine(), tokenizer, api_key="one,two") as service:
        monkeypatch.setattr(service.engine, "expert_load", LOAD, raising=False)
        assert cli.main(["experts", "--port", port_of(service), "--api-key-file", str(file)]) == 0


def test_https_is_spoken_if_the_service_does(tokenizer, monkeypatch):
    with serve(FakeEngine(), tokenizer, ssl_certfile=CERTIFICATE) as service:
        monkeypatch.setattr(service.engine, "expert_load", LOAD, raising=False)
        port = port_of(service)
        assert cli.main(["experts", "--port", port, "--ssl-certfile", str(CERTIFICATE)]) == 0
        assert cli.main(["experts", "--port", port]) == 1


@rows(
    "flags, status, said",
    ([], 2, "start it with --expert-load"),
    (["--port", "0"], 2, "--port: 0 lets"),
    (["--port", "1"], 1, "no answer from 127.0.0.1 port 1"),
    (["--record", "/dev/null/x"], 2, "--record: "),
)
def test_what_goes_wrong_is_said(service, monkeypatch, capsys, flags, status, said):
    if "--record" in flags:
        monkeypatch.setattr(service.engine, "expert_load", LOAD, raising=False)
    assert cli.main(["experts", "--host", "127.0.0.1", "--port", port_of(service), *flags]) == status
    assert said in capsys.readouterr().err
