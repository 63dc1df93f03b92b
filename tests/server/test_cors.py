"""Browsers of other origins (G04): preflights, headers on every kind of answer, and nothing of it by default."""

import pytest

from server.errors import ApiError
from tests.server.conftest import ANSWER, FakeEngine, serve
from tests.tables import rows

ORIGIN = "https://app.example"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}
CHAT = "/v1/chat/completions"
KEY = {"Authorization": "Bearer secret"}
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def open_service(tokenizer):
    with serve(FakeEngine(), tokenizer, api_key="secret", cors_origins=(ORIGIN, "http://localhost:3000")) as service:
        yield service


@pytest.fixture
def http(open_service, harmony):
    open_service.engine.__dict__.update(FakeEngine(script=lambda _request: harmony(ANSWER)).__dict__)
    with open_service.http() as http:
        yield http


def test_a_preflight_needs_no_key_g04(http):
    for path in (CHAT, "/v1/models", "/nothing"):
        response = http.options(path, headers=PREFLIGHT)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in response.headers["access-control-allow-methods"]
        assert response.headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]


@rows(
    "changed",
    {"Origin": "https://evil.example"},
    {"Origin": ORIGIN + ".evil"},
    {"Access-Control-Request-Method": "PUT"},
)
def test_a_preflight_that_is_refused_has_our_error_body_g04(http, changed):
    response = http.options(CHAT, headers=PREFLIGHT | changed)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "cors_refused")
    assert "access-control-allow-origin" not in response.headers
    assert "Origin" in response.headers["vary"]


def test_errors_carry_the_headers_too_g04(http, open_service):
    def check(status, response):
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in response.headers["access-control-expose-headers"].lower()

    def fail(_request):
        raise RuntimeError("a bug")

    origin = {"Origin": ORIGIN}
    check(401, http.post(CHAT, headers=origin, json={"messages": USER}))
    origin |= KEY
    check(200, http.post(CHAT, headers=origin, json={"messages": USER}))
    check(400, http.post(CHAT, headers=origin, json={"messages": []}))
    check(404, http.get("/nothing", headers=origin))
    check(405, http.get(CHAT, headers=origin))
    check(413, http.post(CHAT, headers=origin, content=b" " * 5_000_000))
    open_service.engine.script = fail
    check(500, http.post(CHAT, headers=origin, json={"messages": USER}))
    open_service.engine.ready = False
    check(503, http.post(CHAT, headers=origin, json={"messages": USER}))


def test_pages_may_read_every_header_that_clients_look_at(http):
    def kinds(error):
        return [error, *(each for inner in error.__subclasses__() for each in kinds(inner))]

    response = http.get("/v1/messages/nothing", headers=KEY | {"Origin": ORIGIN})
    exposed = set(response.headers["access-control-expose-headers"].lower().split(", "))
    ids = {name for name in response.headers if name.endswith("request-id")}
    of_errors = {name.lower() for kind in kinds(ApiError) for name in kind("message").headers}
    assert exposed >= ids | of_errors - {"connection", "www-authenticate"}
    assert {"request-id", "x-should-retry", "x-ignored-parameters"} <= exposed


def test_streams_carry_the_headers_g04(http):
    response = http.post(CHAT, headers=KEY | {"Origin": ORIGIN}, json={"messages": USER, "stream": True})
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert response.text.endswith("data: [DONE]\n\n")


def test_other_origins_get_no_leave_g04(http):
    response = http.post(CHAT, headers=KEY | {"Origin": "https://evil.example"}, json={"messages": USER})
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


def test_a_star_means_all_origins_g04(tokenizer):
    with serve(FakeEngine(), tokenizer, cors_origins=("*",)) as service, service.http() as http:
        assert http.options(CHAT, headers=PREFLIGHT).headers["access-control-allow-origin"] == "*"
        assert http.get("/v1/models", headers={"Origin": "null"}).headers["access-control-allow-origin"] == "*"


def test_off_by_default_g04(service):
    with service.http() as http:
        assert http.options(CHAT, headers=PREFLIGHT).status_code == 405
        assert "access-control-allow-origin" not in http.get("/v1/models", headers={"Origin": ORIGIN}).headers
