"""The store of /v1/responses: limits, owners, several processes on one file, and conversations that go on from it."""

import sqlite3

import openai
import pytest

from server.errors import SettingError
from server.responses.store import ResponseStore
from server.schema.responses import InputItem
from tests.server.conftest import ANSWER, CALL, MODEL, WEATHER, FakeEngine, serve
from tests.tables import rows

TOOL = {"type": "function", **WEATHER["function"]}


def store_at(folder, *, max_bytes=10**6, max_age_s=1000.0):
    return ResponseStore(folder / "answers.sqlite", max_bytes=max_bytes, max_age_s=max_age_s)


def put(store, name, *, owner="o", size=100):
    return store.put(owner, {"id": name, "text": "x" * size}, [name])


def kept(store, names):
    return [name for name in names if store.items("o", name) is not None]


def test_the_oldest_answers_go_when_the_size_is_reached(tmp_path):
    store = store_at(tmp_path, max_bytes=1000)
    names = [f"r{number}" for number in range(20)]
    for name in names:
        put(store, name)
    left = kept(store, names)
    assert left == names[-len(left) :]
    assert 1000 // 150 <= len(left) <= 1000 // 100
    assert not put(store, "large", size=2000)
    assert kept(store, [*names, "large"]) == left, "it would have taken the place of all others"


@rows("num_spare_bytes, is_stored", (0, True), (-1, False))
def test_an_answer_may_fill_the_store(tmp_path, num_spare_bytes, is_stored):
    size = len(b'{"id":"r","text":"%b"}' % (b"x" * 100) + b'["r"]')
    store = store_at(tmp_path, max_bytes=size + num_spare_bytes)
    assert put(store, "r") is is_stored
    assert kept(store, ["r"]) == ["r"] * is_stored


def test_answers_that_are_too_old_are_neither_shown_nor_kept(tmp_path, monkeypatch):
    store = store_at(tmp_path, max_age_s=60.0)
    monkeypatch.setattr("time.time", lambda: 1000.0)
    put(store, "old")
    monkeypatch.setattr("time.time", lambda: 1050.0)
    assert store.body("o", "old") is not None
    monkeypatch.setattr("time.time", lambda: 1061.0)
    assert store.body("o", "old") is None
    put(store, "new")
    with sqlite3.connect(tmp_path / "answers.sqlite") as database:
        assert database.execute("SELECT id FROM answers").fetchall() == [("new",)]
    database.close()


def test_an_answer_outlives_its_own_storing(tmp_path):
    """With an age shorter than the write, no row was left to sum up, and the request failed."""
    store = store_at(tmp_path, max_age_s=1e-9)
    assert put(store, "first")
    assert put(store, "second")


def test_only_the_owner_sees_and_deletes_an_answer(tmp_path):
    store = store_at(tmp_path)
    put(store, "r")
    assert store.body("other", "r") is store.items("other", "r") is None
    assert not store.delete("other", "r")
    assert store.delete("o", "r")
    assert not store.delete("o", "r")


def test_the_file_is_private_and_shared_by_processes_and_restarts(tmp_path):
    first, second = store_at(tmp_path), store_at(tmp_path)
    put(first, "a")
    put(second, "b")
    assert first.items("o", "b") == ["b"]
    assert second.items("o", "a") == ["a"]
    assert {file.stat().st_mode & 0o077 for file in tmp_path.iterdir()} == {0}


def test_a_file_that_cannot_be_used_is_refused_at_start(tmp_path):
    (tmp_path / "answers.sqlite").write_bytes(b"not a database, but longer than a header of SQLite" * 100)
    with pytest.raises(SettingError, match="response_store"):
        store_at(tmp_path)
    with pytest.raises(SettingError, match="response_store"):
        store_at(tmp_path / "missing")


def test_a_conversation_goes_on_from_another_process_and_belongs_to_its_key(tmp_path, tokenizer):
    file = tmp_path / "answers.sqlite"
    engine = FakeEngine(script=lambda _request: tokenizer.encode(CALL))
    with serve(engine, tokenizer, response_store=file) as one, serve(engine, tokenizer, response_store=file) as two:
        with one.client(api_key="a") as client:
            first = client.responses.create(model=MODEL, input="Weather?", instructions="Be brief.", tools=[TOOL])
            unstored = client.responses.create(model=MODEL, input="Weather?", store=False)
        assert (first.store, unstored.store) == (True, False)
        engine.script = lambda _request: tokenizer.encode(ANSWER)
        result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "rain"}
        with two.client(api_key="a") as client:
            fields = {"previous_response_id": first.id, "tools": [TOOL]}
            with client.responses.stream(model=MODEL, input=[result], **fields) as stream:
                second = stream.get_final_response()
            prompt = tokenizer.decode(engine.requests[-1].prompt_ids)
            assert second.previous_response_id == first.id
            assert client.responses.retrieve(second.id).output_text == second.output_text
            client.responses.delete(first.id)  # what follows it stays whole
            client.responses.create(model=MODEL, input="Thanks", previous_response_id=second.id)
            for missing in (first.id, unstored.id):
                with pytest.raises(openai.NotFoundError):
                    client.responses.retrieve(missing)
            with pytest.raises(openai.BadRequestError) as refused:
                client.responses.create(model=MODEL, input="Hi", previous_response_id=first.id)
            assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
        with two.client(api_key="b") as client:
            for use in (client.responses.retrieve, client.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    use(second.id)
        assert "Weather?" in prompt
        assert "rain" in prompt
        assert "Be brief." not in prompt  # instructions are not carried over
        assert "rain" in tokenizer.decode(engine.requests[-1].prompt_ids)


def test_an_answer_that_cannot_be_stored_is_given_all_the_same_and_says_so(tmp_path, tokenizer, monkeypatch):
    def fail(*_args):
        raise sqlite3.OperationalError("the disk is full")

    engine = FakeEngine(script=lambda _request: tokenizer.encode(ANSWER))
    monkeypatch.setattr(ResponseStore, "put", fail)
    with serve(engine, tokenizer, response_store=tmp_path / "f") as service, service.client() as client:
        whole = client.responses.create(model=MODEL, input="Hi")
        with client.responses.stream(model=MODEL, input="Hi") as stream:
            streamed = stream.get_final_response()
    assert (whole.store, streamed.store) == (False, False)
    assert whole.output_text == streamed.output_text == "The capital of France is Paris."


def test_an_answer_too_large_for_the_store_says_so_and_removes_no_other(tmp_path, tokenizer):
    engine = FakeEngine(script=lambda _request: tokenizer.encode(ANSWER))
    settings = {"response_store": tmp_path / "f", "response_store_bytes": 4000}
    with serve(engine, tokenizer, **settings) as service, service.client() as client:
        small = client.responses.create(model=MODEL, input="Hi")
        large = client.responses.create(model=MODEL, input="Hi " * 1500)
        assert (small.store, large.store) == (True, False)
        assert client.responses.retrieve(small.id).output_text == small.output_text
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(large.id)


def test_an_answer_that_cannot_be_encoded_for_the_store_is_given_all_the_same(tmp_path, tokenizer, monkeypatch):
    engine = FakeEngine(script=lambda _request: tokenizer.encode(ANSWER))
    monkeypatch.setattr(InputItem, "model_dump", lambda *_args, **_options: {"what": object()})
    with serve(engine, tokenizer, response_store=tmp_path / "f") as service, service.client() as client:
        answer = client.responses.create(model=MODEL, input="Hi")
    assert (answer.store, answer.output_text) == (False, "The capital of France is Paris.")


OWNER = {"Authorization": "Bearer none"}  # as `service.client()`
RETRIEVED = [
    ({"stream": "false"}, None),
    ({"include_obfuscation": "false"}, None),
    ({"include[]": "reasoning.encrypted_content"}, None),
    ({"stream": "true"}, "stream"),
    ({"starting_after": "3"}, "starting_after"),
    ({"include[]": "file_search_call.results"}, "include[]"),
    ({"include": "message.output_text.logprobs"}, "include"),
    ({"colour": "red"}, "colour"),
]


def test_a_stored_answer_is_shown_with_parameters_that_change_nothing(tmp_path, tokenizer, subtests):
    engine = FakeEngine(script=lambda _request: tokenizer.encode(ANSWER))
    wanted = ["message.output_text.logprobs"]
    with serve(engine, tokenizer, response_store=tmp_path / "f") as service, service.client() as client:
        plain = client.responses.create(model=MODEL, input="Hi")
        scored = client.responses.create(model=MODEL, input="Hi", include=wanted)
        with service.http() as http:
            for params, refused in RETRIEVED:
                with subtests.test(params=params):
                    answer = http.get(f"/v1/responses/{plain.id}", params=params, headers=OWNER)
                    assert answer.status_code == (400 if refused else 200)
                    assert refused is None or answer.json()["error"]["param"] == refused
        shown = client.responses.retrieve(scored.id, include=wanted, stream=False)
        assert shown.output[-1].content[0].logprobs == scored.output[-1].content[0].logprobs != []


def test_without_a_store_there_is_nothing_to_show(service):
    with service.client() as client, pytest.raises(openai.NotFoundError, match="--response-store"):
        client.responses.retrieve("resp_1")
