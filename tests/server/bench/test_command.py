"""The command: flags, table, JSON and exit status, with real client processes; once against the real service."""

import asyncio
import json
import subprocess
import sys

import pytest

from server import cli
from server.bench import command, processes
from server.bench.config import default_processes
from server.bench.errors import BenchError
from server.errors import SettingError
from tests.server.bench.fake_server import STREAM_HEAD, chunked, event, polite, serve, text_chunk, usage_of, whole
from tests.server.conftest import wait_until
from tests.server.service_process import ROOT
from tests.tables import rows


def bench(*argv, environ=None):
    return command.bench(argv, "moe-serve", environ or {})


SMALL = ("--prompt-tokens", "8", "--answer-tokens", "3-5", "--warmup", "1")


def test_a_run_with_two_processes(tmp_path, capsys):
    file = tmp_path / "run.json"
    with serve(polite) as server:
        flags = ["bench", "--base-url", server.url, "--api-key", "s3cret", *SMALL, "--num-requests", "20"]
        status = cli.main([*flags, "--concurrency", "4", "--processes", "2", "--json", str(file)])
        assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer s3cret"}
        assert len([asked for asked in server.posts if asked.body["max_tokens"] > 1]) == 21
    shown = capsys.readouterr().out
    document = json.loads(file.read_text())
    assert shown.startswith("fake: /v1/completions with 4 streams, ")
    assert "20 requests finished, 0 failed" in shown
    assert "s3cret" not in file.read_text()
    results = document["results"]
    assert (results["requests_finished"], results["requests_failed"], results["errors"]) == (20, 0, {})
    assert (results["prompt_tokens"], results["token_counting"]) == (160, "per chunk")
    assert 60 <= results["output_tokens"] <= 100
    assert set(results["latencies_ms"]) == {"ttft", "itl", "tpot", "e2e"}
    for latency in results["latencies_ms"].values():
        assert list(latency) == ["count", "mean", "p50", "p90", "p99", "p99.9", "max"]
        assert latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["p99.9"] <= latency["max"]
    assert results["latencies_ms"]["itl"]["count"] == results["output_tokens"] - 20
    assert len(results["client_cpu_shares"]) == 2
    assert document["server"]["version"] == "9.9"
    assert document["server"]["prompts"] == "token ids"
    assert document["command"].startswith("moe-serve bench --base-url")
    assert document["is_void"] == bool(document["void_reasons"]) == (status == 1) == ("VOID" in shown)


def test_failures_are_in_the_table_and_the_status(capsys):
    async def answer(asked, writer):
        if asked.body is not None and asked.body["max_tokens"] > 1:
            writer.write(whole({"error": {"message": "out of memory"}}, 500))
        else:
            await polite(asked, writer)

    with serve(answer) as server:
        assert bench("--base-url", server.url, *SMALL, "--num-requests", "5") == 1
    assert "0 requests finished, 5 failed\n  5 x HTTP 500: out of memory\n" in capsys.readouterr().out


def test_a_busy_client_makes_the_run_void(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("server.bench.summary.MAX_CPU_SHARE", 0.0)
    file = tmp_path / "run.json"
    with serve(polite) as server:
        assert bench("--base-url", server.url, *SMALL, "--num-requests", "5", "--json", str(file)) == 1
    assert "VOID: client process 0 used" in capsys.readouterr().out
    document = json.loads(file.read_text())
    assert document["is_void"]
    assert len(document["void_reasons"]) == 1


def test_a_client_process_that_dies_ends_the_run():
    with serve(polite) as server:
        flags = command.make_parser("x").parse_args(["--base-url", server.url])
        config = command.make_config(flags, {})
        with pytest.raises(BenchError, match="a client process died"):
            processes.run_processes(config, None)  # its traceback is on standard error


def test_the_load_ends_with_a_command_that_is_killed():
    async def endless(asked, writer):
        if asked.body is None or asked.body["max_tokens"] == 1:
            return await polite(asked, writer)
        writer.write(STREAM_HEAD)
        while True:
            writer.write(chunked(event(text_chunk("a", **usage_of(8, 1)))))
            await writer.drain()
            await asyncio.sleep(0.01)

    with serve(endless) as server:
        argv = ["bench", "--base-url", server.url, *SMALL, "--warmup", "0", "--concurrency", "4"]
        with subprocess.Popen([sys.executable, "-m", "server", *argv], cwd=ROOT, stderr=subprocess.DEVNULL) as process:
            wait_until(lambda: server.num_open >= 4, 30)
            process.kill()
        wait_until(lambda: server.num_open == 0, 10)


def test_the_key_comes_from_the_variable_too():
    config = command.make_config(command.make_parser("x").parse_args([]), {"OPENAI_API_KEY": "k"})
    assert config.target.api_key == "k"
    assert "k'" not in repr(config)
    assert (config.concurrency, config.num_requests, config.warmup, config.processes) == (8, 100, 8, 1)


@rows(
    "argv, words",
    (["--concurency", "1"], "did you mean --concurrency?"),
    (["--concurrency", "0"], "--concurrency: 0 must lie between 1 and 100000"),
    (["--concurrency", "1", "--request-rate", "2"], "exclude each other"),
    (["--request-rate", "0"], "--request-rate: 0.0 must be above 0"),
    (["--request-rate", "nan"], "--request-rate: nan must be above 0"),
    (["--seconds", "inf"], "--seconds: inf must be above 0 and finite"),
    (["--timeout", "-1"], "--timeout: -1.0 must be above 0"),
    (["--num-requests", "0"], "--num-requests: 0"),
    (["--warmup", "-1"], "--warmup: -1"),
    (["--processes", "9"], "--processes: 9 must not exceed --concurrency 8"),
    (["--prompt-tokens", "x"], "--prompt-tokens: 'x'"),
    (["--prompt-tokens", "9-3"], "the lower number first"),
    (["--answer-tokens", "0"], "--answer-tokens: '0' must lie between 1 and"),
    (["--vocab-size", "100"], "--vocab-size: 100 must lie between 101 and"),
    (["--extra-body", "{"], "--extra-body: '{' is no JSON"),
    (["--extra-body", "[]"], "must be a JSON object"),
    (["--extra-body", '{"stream": false}'], "--extra-body: 'stream' is set by the benchmark itself"),
    (["--extra-body", '{"top_p": 1, "n": 2}'], "--extra-body: 'n' is set"),
    (["--extra-body", '{"prompt": "a"}'], "'prompt' is set by the benchmark itself; use --prompt-tokens"),
    (["--extra-body", '{"messages": []}'], "'messages' is set by the benchmark itself; use --dataset"),
    (["--extra-body", '{"model": "m"}'], "'model' is set by the benchmark itself; use --model"),
    (["--extra-body", '{"max_tokens": 1}'], "'max_tokens' is set by the benchmark itself; use --answer-tokens"),
    (["--base-url", "localhost:8000"], "--base-url: 'localhost:8000' must be http://HOST:PORT"),
    (["--base-url", "http://h:port"], "is no URL"),
    (["--base-url", "http://a..b:80"], "--base-url: 'http://a..b:80' is no URL"),
    (["--base-url", "http://h:0"], "has port 0"),
    (["--base-url", "http://h:1/a b"], "write them as %XX"),
    (["--api-key", "schlüssel€"], "--api-key holds spaces or characters beyond ASCII"),
    (["--api-key", "a\nb"], "--api-key holds spaces"),
    (["--vocab-size", "9" * 32], "must lie between 101 and"),
    (["--prompt-tokens", "9" * 32], "must lie between 1 and 10000000"),
    (["--warmup", "9" * 32], "--warmup: "),
    (["--concurrency", "9" * 32], "--concurrency: "),
    (["--extra-body", '{"seed": 1%s}' % ("0" * 23)], "is no JSON that can be sent: Integer exceeds"),
    (["--extra-body", '{"user": "\\ud800"}'], "surrogates"),
    (["--extra-body", '{"top_p": NaN}'], "NaN is not JSON"),
    (["--extra-body", '{"a": ' + "[" * 100_000], "nested too deeply"),
    (["--base-url", "http://127.0.0.1:1"], "http://127.0.0.1:1: cannot connect"),
    (["--endpoint", "embeddings"], "--endpoint: invalid choice"),
)
def test_refusals(argv, words):
    with pytest.raises(SettingError) as caught:
        bench(*argv)
    assert words in str(caught.value)


def test_a_plot_without_matplotlib_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(SettingError, match=r"--plot needs matplotlib: pip install matplotlib"):
        bench("--base-url", "http://127.0.0.1:1", "--plot", "x.png")


def test_a_file_that_cannot_be_written(tmp_path, monkeypatch):
    """Refused before the load, not after it; a folder that is missing is not made."""
    monkeypatch.setattr("server.bench.plot.check_matplotlib", lambda: None)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    for flag in ("--json", "--plot"):
        places = (("file/x.png", "is no folder"), ("new/x.png", "is no folder"), ("folder.png", "cannot be written"))
        for place, words in places:
            with serve(polite) as server, pytest.raises(SettingError, match=rf"^{flag}: .* {words}"):
                bench("--base-url", server.url, *SMALL, "--num-requests", "1", flag, str(tmp_path / place))
            assert not server.asked
    assert not (tmp_path / "new").exists()


def test_the_table_is_printed_before_a_file_fails(capsys):
    with serve(polite) as server, pytest.raises(SettingError, match="the result cannot be written"):
        bench("--base-url", server.url, *SMALL, "--num-requests", "1", "--json", "/dev/full")
    assert "1 requests finished, 0 failed" in capsys.readouterr().out


def test_a_picture_of_an_unknown_format_is_refused_before_the_run():
    with serve(polite) as server:
        for command_line in (["--base-url", server.url, "--plot", "r.foo"], ["plot", "a.json", "--out", "r"]):
            with pytest.raises(SettingError, match=r"must end in \.png, \.svg or \.pdf"):
                bench(*command_line)
        assert not server.asked


def test_number_of_processes():
    assert [default_processes(streams, None, 16) for streams in (1, 64, 65, 256, 4096)] == [1, 1, 2, 4, 8]
    assert [default_processes(None, rate, 16) for rate in (0.1, 50, 51, 1000)] == [1, 1, 2, 8]
    assert default_processes(4096, None, 1) == 1


def test_help_imports_nothing_heavy():
    code = "import sys; from server import cli\ntry: cli.main(['bench', '--help'])\nexcept SystemExit: pass\n"
    code += "print({'torch', 'numpy', 'fastapi'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
    assert "--request-rate" in done.stdout


@rows("endpoint", "completions", "chat")
def test_the_real_service(tmp_path, endpoint, bundled_url):
    file = tmp_path / "run.json"
    argv = ["--base-url", bundled_url, "--endpoint", endpoint, "--concurrency", "3", "--num-requests", "6"]
    argv += ["--prompt-tokens", "60", "--answer-tokens", "16", "--ignore-eos", "--warmup", "1", "--json", str(file)]
    bench(*argv)
    document = json.loads(file.read_text())
    results = document["results"]
    assert results["errors"] == {}
    assert (results["requests_finished"], results["output_tokens"]) == (6, 96)
    assert results["token_counting"] == "per chunk"
    assert document["server"]["model"] == "tiny-gpt-oss"
    if endpoint == "completions":
        assert results["prompt_tokens"] == 360
    else:
        assert 300 <= results["prompt_tokens"] <= 430
