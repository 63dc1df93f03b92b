"""A store of answers whose file is locked by another program, removed, or of no use."""

import sqlite3
import threading
import time

import openai
import pytest

from server.config import ServerConfig
from server.doctor.finding import Level
from server.doctor.service import http_findings
from server.responses import store as store_module
from server.responses.store import ResponseStore
from tests.server.conftest import ANSWER, MODEL, FakeEngine, serve


@pytest.fixture
def file(tmp_path):
    return tmp_path / "answers.sqlite"


@pytest.fixture
def store(file, monkeypatch):
    monkeypatch.setattr(store_module, "_BUSY_TIMEOUT_S", 0.2)
    store = ResponseStore(file, max_bytes=10**6, max_age_s=1000.0)
    yield store
    store.close()


@pytest.fixture
def other_program(file, store):
    """Holds the lock of all writers, as a backup or a VACUUM does."""
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    yield
    connection.close()


def put(store, name):
    store.put("o", {"id": name}, [name])


def test_readers_wait_for_no_writer(store, file):
    put(store, "first")
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    errors = []

    def write(name):
        try:
            put(store, name)
        except sqlite3.OperationalError as error:
            errors.append(str(error))

    writers = [threading.Thread(target=write, args=(name,)) for name in ("second", "third", "fourth")]
    start_s = time.monotonic()
    for writer in writers:
        writer.start()
    assert store.items("o", "first") == ["first"]
    assert len(errors) < len(writers), "no reader waits until all writers have given up"
    for writer in writers:
        writer.join()
    assert len(errors) == len(writers)
    assert time.monotonic() - start_s < 10.0
    connection.execute("ROLLBACK")
    connection.close()
    put(store, "fifth")
    assert store.items("o", "fifth") == ["fifth"]


@pytest.mark.usefixtures("other_program")
def test_an_answer_is_not_removed_while_another_program_writes(store):
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        store.delete("o", "first")


def test_clients_are_told_to_ask_again_while_another_program_locks_the_file(file, tokenizer, monkeypatch, caplog):
    monkeypatch.setattr(store_module, "_BUSY_TIMEOUT_S", 0.2)
    engine = FakeEngine(script=lambda _request: tokenizer.encode(ANSWER))
    with serve(engine, tokenizer, response_store=file) as service, service.client() as client:
        answer = client.responses.create(model=MODEL, input="Hi")
        connection = sqlite3.connect(file, isolation_level=None)
        connection.execute("BEGIN EXCLUSIVE")
        with pytest.raises(openai.InternalServerError, match="ask again") as refused:
            client.responses.delete(answer.id)
        assert refused.value.status_code == 503
        assert "locked" in caplog.text
        connection.execute("ROLLBACK")
        connection.close()
        client.responses.delete(answer.id)

        def fail(*_args):
            raise sqlite3.OperationalError(f"{file} is of no use")

        monkeypatch.setattr(ResponseStore, "_column", fail)
        for use in (client.responses.retrieve, lambda name: go_on(client, name)):
            with pytest.raises(openai.InternalServerError, match="ask again") as refused:
                use(answer.id)
            assert refused.value.status_code == 503
            assert str(file) not in refused.value.message


def go_on(client, name):
    client.responses.create(model=MODEL, input="Hi", previous_response_id=name)


def test_an_answer_is_not_written_to_a_file_that_was_removed_or_replaced(store, file):
    put(store, "first")
    file.unlink()
    with pytest.raises(sqlite3.OperationalError, match="restart the service"):
        put(store, "second")
    file.write_bytes(b"")
    with pytest.raises(sqlite3.OperationalError, match="restart the service"):
        put(store, "third")


def test_doctor_opens_the_file_and_leaves_none_that_was_not_there(tmp_path):
    folder = tmp_path / "answers"
    folder.mkdir()
    (folder / "text").write_text("no database, but long enough to be read as one" * 100)
    for name, level in (
        ("new", Level.OK),
        ("nowhere/new", Level.PROBLEM),
        (".", Level.PROBLEM),
        ("text", Level.PROBLEM),
    ):
        [found] = http_findings(ServerConfig(response_store=folder / name))
        assert (found.topic, found.level) == ("answers", level), found
        assert (found.level is Level.OK) == (not found.way_out)
    assert [file.name for file in folder.iterdir()] == ["text"]
    ResponseStore(folder / "kept", max_bytes=1, max_age_s=1).close()
    [found] = http_findings(ServerConfig(response_store=folder / "kept"))
    assert (found.level, (folder / "kept").exists()) == (Level.OK, True)
