"""Who counts as one client in the engine's fair queue (G83)."""

import pytest
from starlette.requests import Request

from server.asker import asker_of
from server.config import ServerConfig
from server.errors import SettingError
from tests.server.conftest import FakeEngine, serve


def ask(host="10.0.0.1", port=1, *, settings=None, key=None, **headers):
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    request = Request({"type": "http", "client": (host, port), "headers": raw, "state": {"key": key}})
    return asker_of(request, ServerConfig(**settings or {}))


def test_addresses_are_clients_and_ports_are_their_connections_g83():
    client, connection = ask()
    assert ask(port=2)[0] == client
    assert ask(port=2)[1] != connection
    assert ask("10.0.0.2")[0] != client


def test_keys_tell_clients_apart_only_where_none_is_asked_for_g83():
    """With --api-key other spellings of a key must not make other clients; other keys do."""
    assert ask(authorization="Bearer a")[0] != ask(authorization="Bearer b")[0]
    assert ask(x_api_key="a")[0] != ask(x_api_key="b")[0]
    one = ask(key=0, authorization="Bearer secret")[0]
    assert one == ask(key=0, authorization="bearer  secret")[0] == ask(key=0, x_api_key="secret")[0]
    assert one != ask(key=1, authorization="Bearer other")[0]
    assert "secret" not in "".join(ask(authorization="Bearer secret"))


def test_a_forwarded_address_counts_only_where_the_operator_says_so_g83():
    assert ask(x_forwarded_for="1.1.1.1")[0] == ask(x_forwarded_for="2.2.2.2")[0]
    behind_proxy = {"client_header": "X-Forwarded-For"}
    one = ask(settings=behind_proxy, x_forwarded_for="1.1.1.1")[0]
    assert one != ask(settings=behind_proxy, x_forwarded_for="2.2.2.2")[0]
    assert one == ask(settings=behind_proxy, x_forwarded_for="9.9.9.9, 1.1.1.1")[0], "what a client sent itself"
    assert ask(settings=behind_proxy)[0] == ask()[0]


@pytest.mark.parametrize("trusted", ["127.0.0.1", "*"])
def test_the_http_server_believes_no_forwarded_address_either(tokenizer, monkeypatch, trusted):
    """Uvicorn would take it for the address of a client, from proxies that this variable names."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    engine = FakeEngine()
    with serve(engine, tokenizer) as service, service.http() as http:
        for address in ("1.1.1.1", "2.2.2.2"):
            http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"X-Forwarded-For": address})
    assert len({request.client for request in engine.requests}) == 1
    assert all(request.connection.startswith("127.0.0.1:") for request in engine.requests)


def test_a_request_without_an_address_is_served():
    request = Request({"type": "http", "client": None, "headers": [], "state": {"key": None}})
    assert asker_of(request, ServerConfig())[1] == ":0"


def test_a_header_that_is_none_is_refused():
    with pytest.raises(SettingError, match="client_header"):
        ServerConfig(client_header="X Forwarded For")


def test_every_choice_of_a_request_has_the_same_asker_g83(service):
    with service.http() as http:
        http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 3, "max_tokens": 1})
    askers = {(request.client, request.connection) for request in service.engine.requests}
    assert len(service.engine.requests) == 6
    assert len(askers) == 1
    assert all(all(asker) for asker in askers)
