"""Keys: which paths they open, however the path is spelled, and what each key may use."""

import http.client
import re
import ssl
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from server import cli
from server.board import Board
from server.config import ServerConfig
from server.errors import SettingError
from server.key_limits import KeyLimits, own_memory
from server.keys import ADMIN_PATHS, OPEN_PATHS, ORDER_PATHS
from server.routes.page import page_routes
from server.service import check_certificate
from tests.server.conftest import FakeEngine, serve, wait_until
from tests.server.service_process import start
from tests.tables import rows

CERTIFICATE = Path(__file__).with_name("localhost.pem")
KEYS = {"api_key": "one,two", "admin_key": "root"}
ASK = {"prompt": "Hi", "max_tokens": 4}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed(tokenizer):
    with serve(FakeEngine(), tokenizer, **KEYS) as service:
        yield service


def request(service, method, path, headers=None):
    """Status and headers; the path goes out as it stands, which other clients would tidy up."""
    connection = http.client.HTTPConnection(urlsplit(service.url).netloc, timeout=20)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.headers
    finally:
        connection.close()


def spellings(path):
    """The path, and others that a router or a proxy might take for it."""
    head, _, tail = path.rpartition("/")
    escaped = "".join(f"%{ord(letter):02x}" for letter in tail)
    return [
        path, f"{head}/{escaped}", f"{head}%2f{tail}", f"{path}?x=1", f"http://elsewhere{path}",  # the same path
        f"{path}/", f"/{path}", f"{path}//", f"{head}//{tail}", f"{head}/./{tail}", f"{head}/%2e/{tail}",
        f"{head}/x/../{tail}", path.upper(), f"{path}%0a", f"{path}%00", f"{path}%20", f"{path};x",
    ]  # fmt: skip


NUM_SAME = 5  # of the spellings


def paths_of(service):
    """Of every route that the app has, those outside its document included."""
    routes = list(service.app.routes)
    for route in service.app.routes:
        routes += getattr(getattr(route, "original_router", None), "routes", ())
    paths = {route.path for route in routes if hasattr(route, "path")}
    assert {"/v1/chat/completions", "/metrics", "/openapi.json"} <= paths
    return [re.sub(r"{.*}", "m", path) for path in paths]


def opens(service, method, path, headers=None):
    status, answered = request(service, method, path, headers)
    assert answered["x-request-id"], (method, path)
    return status not in (401, 403)


def test_every_route_needs_a_key_however_its_path_is_spelled(keyed):
    opened = set()
    for path in paths_of(keyed):
        for spelling in spellings(path):
            methods = ("GET", "HEAD", "POST", "OPTIONS", "DELETE") if spelling == path else ("GET", "HEAD")
            opened.update(spelling for method in methods if opens(keyed, method, spelling))
    open_paths = OPEN_PATHS.union(route.path for route in page_routes())
    assert opened == {spelling for path in open_paths for spelling in spellings(path)[:NUM_SAME]}


def test_admin_routes_open_to_the_admin_key_alone(keyed):
    for path in ADMIN_PATHS | ORDER_PATHS:
        method = "POST" if path in ORDER_PATHS else "GET"
        for spelling in spellings(path):
            status, _ = request(keyed, method, spelling, bearer("one"))
            assert status in (400, 403, 404), spelling
            assert not spelling.endswith("%0a") or status == 400  # a pattern's $ matches before a line break
        assert request(keyed, method, path, bearer("root"))[0] == 200
        assert request(keyed, method, path)[0] == 401


@rows(
    "headers, status",
    (bearer("one"), 200),
    (bearer("two"), 200),
    (bearer("root"), 200),
    ({"Authorization": "bearer   two"}, 200),
    ({"x-api-key": "two"}, 200),
    (bearer("one,two"), 401),
    (bearer("on"), 401),
    (bearer(""), 401),
    ({"Authorization": "one"}, 401),
    ({"x-api-key": ""}, 401),
    ({"Authorization": "Basic one", "x-api-key": "three"}, 401),
    ({}, 401),
)
def test_each_key_opens_the_api(headers, status, keyed):
    assert request(keyed, "GET", "/v1/models", headers)[0] == status


def test_an_admin_key_alone_leaves_the_api_open(tokenizer):
    with serve(FakeEngine(), tokenizer, admin_key="root") as service:
        assert request(service, "GET", "/v1/models")[0] == 200
        assert request(service, "GET", "/metrics")[0] == 401
        assert request(service, "GET", "/metrics", bearer("root"))[0] == 200


def test_answers_of_every_layer_have_a_request_id(tokenizer):
    with serve(FakeEngine(), tokenizer, cors_origins=("http://page",)) as service, service.http() as client:
        preflight = {"Origin": "http://page", "Access-Control-Request-Method": "POST", "X-Request-Id": "mine"}
        assert client.options("/v1/models", headers=preflight).headers["x-request-id"] == "mine"
        refused = client.options("/v1/models", headers=preflight | {"Origin": "http://other"})
        assert (refused.status_code, refused.headers["x-request-id"]) == (400, "mine")
        assert request(service, "GET", "/v1/models", {"Transfer-Encoding": "gzip"})[1]["x-request-id"]
        assert request(service, "GET", "/nothing")[1]["x-request-id"]


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


def limits_of(clock=None, memory=None, **settings):
    config = ServerConfig(**{"api_key": "one,two", **settings})
    return KeyLimits(config, memory or own_memory(len(config.api_keys)), clock or Clock())


def spend(limits, num_tokens, key=0):
    with limits.admitted(key, 1, lambda: num_tokens):
        pass


def test_a_key_that_has_spent_its_tokens_waits_until_they_flow_back():
    clock = Clock()
    limits = limits_of(clock, tokens_per_minute_per_key=60)
    spend(limits, 59)
    spend(limits, 31)  # the last token allows an answer of any length: 90 are spent, one flows back a second
    with pytest.raises(Exception, match="60 tokens a minute") as caught:
        limits.check(0, 1)
    assert caught.value.headers == {"Retry-After": "31"}
    limits.check(1, 1)
    limits.check(None, 1)
    clock.now_s += 30
    with pytest.raises(Exception, match="60 tokens a minute"):
        limits.check(0, 1)
    clock.now_s += 1
    limits.check(0, 1)
    clock.now_s += 1000
    spend(limits, 60)  # no more than a minute's tokens are saved up
    with pytest.raises(Exception, match="60 tokens a minute"):
        limits.check(0, 1)


def test_an_answer_that_fails_is_paid_for_and_one_that_was_refused_is_not():
    limits = limits_of(tokens_per_minute_per_key=10)
    for error in (limits_of(max_requests_per_key=1), None):
        with ExitStack() as stack:
            stack.enter_context(pytest.raises(Exception))  # noqa: PT011  whatever it is
            with limits.admitted(0, 1, lambda: 10):
                if error is None:
                    raise ValueError("the client left")
                spend_twice(error)
        assert is_refused(limits, 0) == (error is None)


def spend_twice(limits):
    """Raises what the engine's full queue raises."""
    with limits.admitted(0, 1, lambda: 0):
        limits.check(0, 1)


def is_refused(limits, key):
    try:
        limits.check(key, 1)
    except Exception:
        return True
    return False


def test_places_are_counted_by_answers_and_given_back():
    limits = limits_of(max_requests_per_key=3)
    with limits.admitted(0, 2, lambda: 5):
        limits.check(0, 1)
        with pytest.raises(Exception, match="3 answers in flight"):
            limits.check(0, 2)
        limits.check(1, 3)
    limits.check(0, 3)
    with pytest.raises(Exception, match="4 answers") as caught:
        limits.check(0, 4)
    assert caught.value.status == 400


def test_each_key_has_the_limits_that_stand_behind_it():
    clock = Clock()
    keys = "one,two max_requests=3 tokens_per_minute=30,three max_requests=none"
    limits = limits_of(clock, api_key=keys, max_requests_per_key=1)
    with ExitStack() as stack:
        for key, num_answers in ((0, 1), (1, 3), (2, 50)):
            stack.enter_context(limits.admitted(key, num_answers, lambda: 45))
        assert [is_refused(limits, key) for key in (0, 1, 2)] == [True, True, False]
    assert [is_refused(limits, key) for key in (0, 1, 2)] == [False, True, False]
    clock.now_s += 31  # half a token flows back a second
    assert not is_refused(limits, 1)


def test_limits_hold_for_all_http_processes_together(tokenizer):
    """Two processes share a key's two places; a third answer gets a 429, a key of another client its places."""
    settings = {"api_key": "one max_requests=2,two", "api_workers": 2}
    engine = FakeEngine(script=lambda _request: [5] * 200, delay_s=0.02)
    with two_processes(engine, tokenizer, settings) as (service, apps), ExitStack() as stack:
        streams = []
        for number in range(3):
            client = stack.enter_context(httpx2.Client(base_url=service.url, timeout=20))
            body = {**ASK, "max_tokens": 100, "stream": True}
            streams.append(
                stack.enter_context(client.stream("POST", "/v1/completions", json=body, headers=bearer("one")))
            )
            wait_until(
                lambda number=number: sum(app.state.context.gate.num_inflight for app in apps) == min(number + 1, 2)
            )
        assert [each.status_code for each in streams] == [200, 200, 429]
        assert streams[2].headers["retry-after"] == "1"
        assert sorted(app.state.context.gate.num_inflight for app in apps) == [1, 1]
        other = httpx2.post(f"{service.url}/v1/completions", json={**ASK, "n": 2}, headers=bearer("two"))
        assert other.status_code == 200
        for stream in streams[:2]:
            stream.close()
        wait_until(lambda: not sum(app.state.context.gate.num_inflight for app in apps))
        again = httpx2.post(f"{service.url}/v1/completions", json=ASK, headers=bearer("one"))
        assert again.status_code == 200


class two_processes:
    """A service of two HTTP processes, as threads."""

    def __init__(self, engine, tokenizer, settings):
        from tests.server.api_threads import ApiThreads

        config = ServerConfig(served_model_name=("m",), log_level="error", **settings)
        self._threads = ApiThreads(engine, tokenizer, config, settings["api_workers"])

    def __enter__(self):
        self._threads.__enter__()
        return self._threads, self._threads.apps

    def __exit__(self, *exc):
        self._threads.__exit__(*exc)


@rows("is_streamed, num_processes", (False, 1), (True, 1), (True, 2))
def test_tokens_of_prompt_and_answer_count_at_every_endpoint(is_streamed, num_processes, tokenizer):
    """New connections go to the processes in turn."""
    settings = {"api_key": "one tokens_per_minute=3,two", "api_workers": num_processes}
    limited = "this key has spent its 3 tokens a minute"
    with ExitStack() as stack:
        engine = FakeEngine(script=lambda _request: [5] * 4)
        if num_processes == 1:
            service = stack.enter_context(serve(engine, tokenizer, **settings))
        else:
            service, _ = stack.enter_context(two_processes(engine, tokenizer, settings))

        def ask(path, body, key="one"):
            return httpx2.post(f"{service.url}{path}", json={**body, "stream": is_streamed}, headers=bearer(key))

        assert ask("/v1/completions", ASK).status_code == 200
        [model] = httpx2.get(f"{service.url}/v1/models", headers=bearer("one")).json()["data"]
        messages = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        for path, body in (
            ("/v1/completions", ASK),
            ("/v1/chat/completions", messages),
            ("/v1/responses", {"input": "Hi"}),
            ("/v1/messages", {"model": model["id"], **messages}),
        ):
            for _ in range(num_processes):
                refused = ask(path, body)
                error = refused.json()["error"]
                assert (refused.status_code, error["type"]) == (429, "rate_limit_error")
                assert error["message"].startswith(limited)
                assert 1 <= int(refused.headers["retry-after"]) <= 60
                if path == "/v1/messages":
                    assert refused.json() == {
                        "type": "error",
                        "error": error,
                        "request_id": refused.headers["request-id"],
                    }
                else:
                    assert (error["param"], error["code"]) == (None, "rate_limit_exceeded")
        assert ask("/v1/completions", ASK, "two").status_code == 200


def test_https(tokenizer):
    trusting = ssl.create_default_context(cafile=CERTIFICATE)
    with serve(FakeEngine(), tokenizer, ssl_certfile=CERTIFICATE) as service:
        url = service.url.replace("http://", "https://")
        with httpx2.Client(base_url=url, verify=trusting, timeout=20) as client:
            assert client.get("/v1/models").status_code == 200
            with client.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as stream:
                assert list(stream.iter_lines())[-2] == "data: [DONE]"
        port = str(urlsplit(service.url).port)
        assert cli.main(["health", "--port", port, "--ssl-certfile", str(CERTIFICATE)]) == 0
        assert cli.main(["health", "--port", port]) == 1


def test_https_with_several_processes(tokenizer):
    settings = {"api_workers": 2, "ssl_certfile": CERTIFICATE}
    with two_processes(FakeEngine(), tokenizer, settings) as (service, _apps):
        url = service.url.replace("http://", "https://")
        with httpx2.Client(base_url=url, verify=ssl.create_default_context(cafile=CERTIFICATE)) as client:
            assert client.post("/v1/completions", json=ASK).status_code == 200


@rows("text", "", "no certificate")
def test_a_certificate_that_cannot_be_used_is_refused_at_start(text, tmp_path):
    file = tmp_path / "cert.pem"
    file.write_text(text)
    with pytest.raises(SettingError, match="ssl_certfile"):
        check_certificate(ServerConfig(ssl_certfile=file))
    with pytest.raises(SettingError, match=f"ssl_keyfile {file} has no usable private key"):
        check_certificate(ServerConfig(ssl_certfile=CERTIFICATE, ssl_keyfile=file))
    check_certificate(ServerConfig(ssl_certfile=CERTIFICATE))


def test_the_file_at_fault_is_named(tmp_path):
    pem = CERTIFICATE.read_text()
    begin = pem.index("-----BEGIN CERTIFICATE")
    end = pem.index("-----END CERTIFICATE-----") + len("-----END CERTIFICATE-----\n")
    alone = tmp_path / "alone.pem"
    alone.write_text(pem[begin:end])
    missing = tmp_path / "missing.pem"
    for settings, words in (
        ({"ssl_certfile": missing}, f"ssl_certfile {missing} cannot be read: No such file"),
        ({"ssl_certfile": CERTIFICATE, "ssl_keyfile": missing}, f"ssl_keyfile {missing} cannot be read: No such file"),
        ({"ssl_certfile": alone}, f"ssl_certfile {alone} has no usable private key: .*; set ssl_keyfile if"),
    ):
        with pytest.raises(SettingError, match=words):
            check_certificate(ServerConfig(**settings))
    check_certificate(ServerConfig(ssl_certfile=alone, ssl_keyfile=CERTIFICATE))


def test_a_process_that_dies_gives_its_keys_places_back():
    config = ServerConfig(api_key="one,two,three", max_requests_per_key=1)
    board = Board.create(2, ["m"], 3)
    attached = Board(board.descriptor, 2, board.started_s, 3)  # as in another process
    limits = [KeyLimits(config, each.key_memory(slot)) for slot, each in enumerate((board, attached))]
    board.append(1, "x" * 100)  # counters and keys do not share memory
    with limits[1].admitted(1, 1, lambda: 0):
        assert [is_refused(limits[0], key) for key in range(3)] == [False, True, False]
        with limits[0].admitted(2, 1, lambda: 0):
            board.reset_gauges(1)
            assert [is_refused(limits[0], key) for key in range(3)] == [False, False, True]


def test_processes_share_limits_and_serve_https(tmp_path):
    """Real processes: the tokens that a key has used at one are used at the other, too."""
    file = tmp_path / "keys"
    file.write_text("one tokens_per_minute=20\ntwo\n")
    argv = ("--api-workers", "2", "--api-key-file", str(file), "--ssl-certfile", str(CERTIFICATE))
    with start(tmp_path, "slow", *argv) as service, ExitStack() as stack:
        wait_until(lambda: "ready at https://" in service.out, 60)
        url = re.search(r"ready at (https://\S+)/v1", service.out)[1]
        trusting = ssl.create_default_context(cafile=CERTIFICATE)
        clients = [stack.enter_context(httpx2.Client(base_url=url, verify=trusting, timeout=20)) for _ in range(4)]
        statuses = [ask_as(client, "one", 30) for client in clients]  # connections go to the processes in turn
        assert statuses == [200, 429, 429, 429]
        assert [ask_as(client, "two", 5) for client in clients] == [200, 200, 200, 200]


def ask_as(client, key, num_tokens):
    body = {"prompt": [5], "max_tokens": num_tokens}
    return client.post("/v1/completions", json=body, headers=bearer(key)).status_code
