"""What operators and routers ask over HTTP: aborts by id, a reset of the prefix cache, profiles, the load."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.server.conftest import FakeEngine, serve, wait_until
from tests.server.test_deadline import BODIES
from tests.tables import rows

ORDERS = ("reset_prefix_cache", "start_profile", "stop_profile")


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed(tokenizer):
    with serve(FakeEngine(), tokenizer, api_key="one,two", admin_key="root") as service, service.http() as http:
        yield service, http


class Asking:
    """A request in another thread, which the engine would answer for a very long time."""

    def __init__(self, service, http, path, headers, **fields):
        service.engine.script, service.engine.delay_s = lambda _request: [65] * 3000, 0.02
        num_before = len(service.engine.running)
        self._pool = ThreadPoolExecutor(1)
        body = {**BODIES[path], **fields}
        self._answer = self._pool.submit(lambda: http.post(path, json=body, headers=headers))
        wait_until(lambda: len(service.engine.running) > num_before)
        self.engine_id = list(service.engine.running)[-1]

    def answer(self):
        with self._pool:
            return self._answer.result(10)


@rows("path", *BODIES)
def test_a_request_is_aborted_by_either_of_its_ids(path, keyed):
    service, http = keyed
    for number, by in enumerate(("X-Request-Id", "answer")):
        name = f"mine-{number}"
        asking = Asking(service, http, path, {**bearer("one"), "X-Request-Id": name})
        rid = name if by == "X-Request-Id" else asking.engine_id.removesuffix("-0")
        for key, foreign in (("two", rid), ("one", "other")):
            assert http.post("/abort_request", json={"rid": foreign}, headers=bearer(key)).status_code == 200
        assert asking.engine_id in service.engine.running, "another key, or another id"
        http.post("/abort_request", json={"rid": ["other", rid]}, headers=bearer("one")).raise_for_status()
        answer = asking.answer()
        assert answer.status_code == 499
        assert "aborted" in answer.json()["error"]["message"]
        assert asking.engine_id in service.engine.aborted


def test_a_key_aborts_all_its_own_and_the_admin_key_all(keyed):
    service, http = keyed
    one, two = (Asking(service, http, "/v1/completions", bearer(key), max_tokens=3000) for key in ("one", "two"))
    http.post("/abort_request", json={"abort_all": True}, headers=bearer("one")).raise_for_status()
    assert one.answer().json()["error"]["code"] == "aborted"
    assert two.engine_id in service.engine.running
    http.post("/abort_request", json={"abort_all": True}, headers=bearer("root")).raise_for_status()
    assert two.answer().status_code == 499
    assert not service.engine.running


def test_an_aborted_stream_ends_with_the_error(keyed):
    service, http = keyed
    fields = {"stream": True, "max_tokens": 3000}
    asking = Asking(service, http, "/v1/completions", bearer("one"), **fields)
    http.post("/abort_request", json={"rid": asking.engine_id.removesuffix("-0")}, headers=bearer("root"))
    text = asking.answer().text.removesuffix("\n\n")
    assert json.loads(text.rpartition("data: ")[2] or text)["error"]["code"] == "aborted"


def test_without_keys_anybody_may_abort(service):
    with service.http() as http:
        asking = Asking(service, http, "/v1/completions", {"X-Request-Id": "mine", **bearer("whatever")})
        http.post("/abort_request", json={"rid": "mine"}).raise_for_status()
        assert asking.answer().status_code == 499


@rows(
    "body",
    {},
    {"abort_all": False},
    {"rid": "a", "abort_all": True},
    {"rid": []},
    {"rid": ""},
    {"rid": [1]},
    {"rid": 1},
)
def test_an_abort_says_of_what(body, service):
    with service.http() as http:
        answer = http.post("/abort_request", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "rid")


@rows("kind", *ORDERS)
def test_orders_reach_the_engine_and_need_the_admin_key(kind, keyed, service, tokenizer):
    keyed_service, http = keyed
    for key, status in (("two", 403), ("wrong", 401), ("root", 200)):
        assert http.post(f"/{kind}", headers=bearer(key)).status_code == status
    assert keyed_service.engine.orders[-1] == kind
    with service.http() as open_http:  # a service without keys
        assert open_http.post(f"/{kind}").json() == {"status": "done"}
        service.engine.refusal = "it cannot"
        refused = open_http.post(f"/{kind}")
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "it cannot")
        service.engine.refusal, service.engine.ready = None, False
        assert open_http.post(f"/{kind}").status_code == 503
        service.engine.ready = True


def test_without_an_admin_key_clients_with_keys_give_no_orders(tokenizer):
    with serve(FakeEngine(), tokenizer, api_key="one") as service, service.http() as http:
        for kind in ORDERS:
            answer = http.post(f"/{kind}", headers=bearer("one"))
            assert answer.status_code == 403
            assert "--admin-key" in answer.json()["error"]["message"]
        assert not service.engine.orders
        assert http.get("/metrics", headers=bearer("one")).status_code == 200


def test_the_load_is_there_for_routers(service):
    with service.http() as http:
        asking = Asking(service, http, "/v1/completions", {"X-Request-Id": "mine"})
        load = http.get("/load").json()
        http.post("/abort_request", json={"rid": "mine"})
        asking.answer()
    assert (load["running"], load["waiting"], load["server_load"], load["max_requests"]) == (1, 0, 1, 100)
    assert load["kv_usage"] == load["kv_pages_used"] == 0


def test_the_real_engine_forgets_prompts_and_refuses_profiles_without_a_folder(bundled_url):
    prompt = {"prompt": "The capital of France is Paris, and that of Italy is Rome. " * 4, "max_tokens": 1}
    with httpx2.Client(base_url=bundled_url, timeout=60) as http:

        def num_cached():
            usage = http.post("/v1/completions", json=prompt).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        num_cached()
        assert num_cached() > 0
        assert http.post("/reset_prefix_cache").json() == {"status": "done"}
        assert num_cached() == 0
        assert num_cached() > 0
        for kind in ORDERS[1:]:
            refused = http.post(f"/{kind}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "order_refused")
