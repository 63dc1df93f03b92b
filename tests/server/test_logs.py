"""Log lines as JSON, the log of requests (lengths unless text is asked for), slow requests, and SIGUSR1."""

import io
import json
import logging
import signal
import sys

import pytest

from engine.logs import FIELDS, JsonFormatter, log_to_stderr
from server import cli
from server.config import ServerConfig
from server.errors import SettingError
from tests.server.conftest import ANSWER, FakeEngine, one_process_only, serve, wait_until
from tests.server.service_process import start
from tests.server.test_life import LONG, Clients
from tests.tables import rows

SECRET = "the launch code is 0000"
BODY = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 40}


def record_of(message, *args, **extra):
    logger = logging.getLogger("some.logger")
    return logger.makeRecord(
        logger.name, logging.WARNING, __file__, 1, message, args, extra.pop("exc_info", None), **extra
    )


def test_a_line_of_json_holds_message_fields_and_exception_in_one_line():
    try:
        raise ValueError("line one\nline two")
    except ValueError:
        record = record_of("%d is\n%s", 7, "ü", exc_info=sys.exc_info(), extra={FIELDS: {"request_id": "r1"}})
    record.created = 0.5
    line = JsonFormatter().format(record)
    assert "\n" not in line
    shown = json.loads(line)
    assert shown.pop("exception").endswith("ValueError: line one\nline two")
    assert isinstance(shown.pop("process"), int)
    assert shown == {
        "time": "1970-01-01T00:00:00.500+00:00", "level": "warning", "logger": "some.logger", "message": "7 is\nü",
        "request_id": "r1",
    }  # fmt: skip


@rows("log_format", "text", "json")
def test_both_formats_go_to_standard_error(monkeypatch, log_format):
    root = logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(logging, "root", root)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    log_to_stderr("info", log_format)
    root.info("hello %s", "you")
    root.debug("not this")
    [line] = sys.stderr.getvalue().splitlines()
    if log_format == "json":
        assert json.loads(line)["message"] == "hello you"
    else:
        assert line.endswith(" INFO root: hello you")


@rows(
    "argv, variable, file, words",
    (["--log-format", "json", "--model", "/nowhere"], None, None, "--model: '/nowhere' does not exist"),
    (["--model", "/nowhere"], "json", None, "--model: '/nowhere' does not exist"),
    (["--model", "/nowhere"], None, "log_format: json", "--model: '/nowhere' does not exist"),
    (["--log-format", "json", "--max-num-seqs", "0"], None, None, "--max-num-seqs"),
    (["--no-such-flag"], "json", None, "--no-such-flag"),
    (["--log-format", "json", "--no-such-flag"], None, None, "--no-such-flag"),
    (["--log-format=json", "--no-such-flag"], "text", None, "--no-such-flag"),
    (["--log-format", "text", "--no-such-flag"], "json", None, None),
    (["--log-format", "text", "--model", "/nowhere"], "json", None, None),
    (["plan", "--model", "/nowhere"], "json", None, None),
)
def test_a_refused_start_is_a_record_where_the_log_is_json(
    monkeypatch, tmp_path, capsys, argv, variable, file, words
):  # fmt: skip
    """It was text between lines of JSON, so that a pipeline dropped the reason."""
    if variable is not None:
        monkeypatch.setenv("MOE_SERVE_LOG_FORMAT", variable)
    if file is not None:
        (tmp_path / "service.yaml").write_text(file)
        argv = [*argv, "--config", str(tmp_path / "service.yaml")]
    assert cli.main(argv) == cli.USAGE_ERROR
    [line] = capsys.readouterr().err.splitlines()
    if words is None:
        assert line.startswith("moe-serve: ")
    else:
        record = json.loads(line)
        assert (record["level"], record["logger"]) == ("error", "server.cli")
        assert words in record["message"]


@pytest.fixture
def engine(harmony):
    def last(_request, _num_tokens):
        return {"queue_s": 0.5, "prefill_s": 0.25, "num_cached_tokens": 3}

    return FakeEngine(script=lambda _request: harmony(ANSWER), last=last)


def logged(caplog):
    """Records of the request log."""
    return [each for each in caplog.records if each.name == "server.request_log"]


def ask(engine, tokenizer, caplog, body=BODY, **settings):
    """Status of an answer, and the log record about it, if there is one."""
    caplog.set_level(logging.INFO, "server.request_log")
    with serve(engine, tokenizer, **settings) as service, service.http() as http:
        answer = http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"})
        answer.read()
    records = logged(caplog)
    assert len(records) <= 1
    return answer, records[0] if records else None


@rows("stream", False, True)
def test_lengths_and_times_are_logged_and_never_text(engine, tokenizer, caplog, stream):
    answer, record = ask(engine, tokenizer, caplog, BODY | {"stream": stream}, log_requests="lengths")
    assert answer.status_code == 200
    fields = getattr(record, FIELDS)
    assert record.levelname == "INFO"
    assert fields.items() >= {"request_id": "mine-1", "model": "tiny", "outcome": "stop", "cached_tokens": 3}.items()
    assert fields.items() >= {"queue_seconds": 0.5, "prefill_seconds": 0.25}.items()
    assert fields["engine_id"] == engine.requests[-1].request_id
    assert fields["prompt_tokens"] == len(engine.requests[-1].prompt_ids)
    assert fields["generated_tokens"] == len(tokenizer.encode(ANSWER))
    assert 0 <= fields["first_token_seconds"] <= fields["seconds"]
    whole = JsonFormatter().format(record)
    assert record.getMessage().startswith('request: request_id="mine-1" engine_id="chatcmpl-')
    assert SECRET not in whole
    assert "Paris" not in whole
    assert "text" not in whole


@rows("stream", False, True)
def test_text_is_logged_if_asked_for(engine, tokenizer, caplog, stream):
    _, record = ask(engine, tokenizer, caplog, BODY | {"stream": stream}, log_requests="text")
    fields = getattr(record, FIELDS)
    [prompt], [answer] = fields["prompts"], fields["answers"]
    assert SECRET in prompt
    assert answer == ANSWER
    assert "\n" not in record.getMessage()  # a prompt cannot forge a log line


@rows(
    "settings, level",
    ({}, None),
    ({"slow_request_seconds": 1000.0}, None),
    ({"slow_request_seconds": 1e-9}, "WARNING"),
    ({"slow_request_seconds": 1e-9, "log_requests": "lengths"}, "WARNING"),
    ({"slow_request_seconds": 1000.0, "log_requests": "lengths"}, "INFO"),
)
def test_slow_requests_are_logged_as_warnings_once(engine, tokenizer, caplog, settings, level):
    _, record = ask(engine, tokenizer, caplog, **settings)
    assert (record and record.levelname) == level
    if level == "WARNING":
        assert record.getMessage().startswith("slow request: ")
        assert SECRET not in record.getMessage()


def test_an_answer_that_fails_is_logged_with_its_status(tokenizer, caplog):
    engine = FakeEngine(script=lambda _request: [5], last=lambda *_: {"finish_reason": "error", "error": "bad luck"})
    answer, record = ask(engine, tokenizer, caplog, log_requests="lengths")
    assert getattr(record, FIELDS)["outcome"] == f"error {answer.status_code}"


def test_a_client_that_leaves_is_logged(tokenizer, caplog):
    caplog.set_level(logging.INFO, "server.request_log")
    engine = FakeEngine(script=lambda _request: [5] * 1000, delay_s=0.01)
    with serve(engine, tokenizer, log_requests="lengths") as service, service.http() as http:
        with http.stream("POST", "/v1/completions", json={"prompt": [5], "max_tokens": 999, "stream": True}) as answer:
            next(answer.iter_lines())
        wait_until(lambda: logged(caplog))
    [record] = logged(caplog)
    assert getattr(record, FIELDS)["outcome"] == "client left"


@rows(
    "argv, value",
    ([], "off"),
    (["--log-requests"], "lengths"),
    (["--log-requests", "--port", "1"], "lengths"),
    (["--log-requests", "text"], "text"),
)
def test_the_flag_alone_means_lengths(argv, value):
    settings = cli.all_settings()
    given = cli.gather(settings, vars(cli.make_parser(settings, "moe-serve", "").parse_args(argv)), {})
    config, _, _ = cli.make_configs(settings, given)
    assert config.log_requests == value


def test_other_values_are_refused():
    with pytest.raises(SettingError, match="log_requests is 'all': it must be one of off, lengths, text"):
        ServerConfig(log_requests="all")


@pytest.mark.processes
@one_process_only
def test_sigusr1_dumps_every_process_and_the_service_goes_on_with_json_logs(tmp_path):
    flags = ("--api-workers", "2", "--log-format", "json", "--log-requests")
    with start(tmp_path, "slow", *flags) as service:
        clients = Clients(service, 2, {**LONG, "max_tokens": 60})
        service.signal(signal.SIGUSR1)
        pids = [service.process.pid, service.engine_pid, *service.api_pids]
        wait_until(lambda: all(f"process {pid}: " in service.err for pid in pids))
        clients.join()
        assert [answer.status_code for answer in clients.answers] == [200, 200]
        err = service.err
        assert err.count("Current thread") >= len(pids)
        assert f"process {service.engine_pid}: engine process of rank 0: " in err
        assert f"process {service.process.pid}: the service: the engine is ready" in err
        wait_until(lambda: service.err.count('"logger": "server.request_log"') == 2)
        service.signal(signal.SIGTERM)
        assert service.process.wait(20) == 0
        lines = [json.loads(line) for line in service.err.splitlines() if line.startswith("{")]
        assert {each["outcome"] for each in lines if each["logger"] == "server.request_log"} == {"length"}
        assert "SIGTERM: draining" in {each["message"] for each in lines}
