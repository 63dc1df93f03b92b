"""`ResponseStore`: answers of /v1/responses in an SQLite file, which all HTTP processes of a service share.

Every answer is stored with the items of its whole conversation, so that a conversation can go on although its older
answers have been removed. Each owner sees only their own answers.

Reading and writing have a connection each. Readers wait for no writer (SQLite's WAL mode), because requests of other
endpoints wait in the threads that read; a writer waits for others for a few seconds at most, then gives up.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from server.config import ServerConfig
from server.errors import SettingError

_BUSY_TIMEOUT_S = 2.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL, num_bytes INTEGER NOT NULL,
    body BLOB NOT NULL, items BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS answers_by_age ON answers (created, num_bytes);
"""


class ResponseStore:
    """Keeps the newest answers: none older than `max_age_s`, and together at most `max_bytes`. Usable from threads."""

    def __init__(self, file: Path, *, max_bytes: int, max_age_s: float) -> None:
        """Open the file, or make it, readable for nobody else. Raises SettingError."""
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._file = file
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        try:
            os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
            self._inode = _inode_of(file)
            self._writer = _connect(file)
            self._writer.execute("PRAGMA journal_mode = WAL")
            self._writer.execute("PRAGMA synchronous = NORMAL")
            self._writer.executescript(_SCHEMA)
            self._reader = _connect(file)
        except (OSError, sqlite3.Error) as error:
            raise SettingError(f"response_store {file} cannot be used as an SQLite file: {error}") from error

    def put(self, owner: str, body: dict[str, Any], items: Sequence[Any]) -> bool:
        """Store an answer with its conversation, and remove what is too old or too much.

        False if it alone exceeds `max_bytes`: then nothing is stored or removed. Raises sqlite3.Error.
        """
        data, conversation = orjson.dumps(body), orjson.dumps(items)
        size = len(data) + len(conversation)
        if size > self._max_bytes:
            return False
        now = time.time()
        row = (body["id"], owner, now, size, data, conversation)
        with self._transaction() as database:
            database.execute("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?)", row)
            database.execute("DELETE FROM answers WHERE created < ?", (now - self._max_age_s,))
            [num_bytes] = database.execute("SELECT SUM(num_bytes) FROM answers").fetchone()
            while num_bytes > self._max_bytes:
                oldest = "SELECT id, num_bytes FROM answers ORDER BY created LIMIT 1"
                removed, freed = database.execute(oldest).fetchone()
                database.execute("DELETE FROM answers WHERE id = ?", (removed,))
                num_bytes -= freed
        return True

    def body(self, owner: str, response_id: str) -> bytes | None:
        """The JSON of an answer; None if the owner has none of this id."""
        return self._column("body", owner, response_id)

    def items(self, owner: str, response_id: str) -> list[Any] | None:
        """The items of an answer's conversation, its output included; None if the owner has none of this id."""
        data = self._column("items", owner, response_id)
        return None if data is None else orjson.loads(data)

    def delete(self, owner: str, response_id: str) -> bool:
        """Remove an answer; False if the owner has none of this id. Raises sqlite3.Error."""
        with self._transaction() as database:
            found = database.execute("DELETE FROM answers WHERE id = ? AND owner = ?", (response_id, owner))
            return found.rowcount > 0

    def close(self) -> None:
        """Close the file."""
        self._reader.close()
        self._writer.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """The writer's connection, for one thread at a time. What it did is undone after an error."""
        if not self._write_lock.acquire(timeout=_BUSY_TIMEOUT_S):
            raise sqlite3.OperationalError("other answers wait to be stored")
        try:
            if _inode_of(self._file) != self._inode:
                raise sqlite3.OperationalError(f"{self._file} was removed or replaced: restart the service")
            with self._writer as database:
                yield database
        finally:
            self._write_lock.release()

    def _column(self, column: str, owner: str, response_id: str) -> bytes | None:
        query = f"SELECT {column} FROM answers WHERE id = ? AND owner = ? AND created >= ?"
        with self._read_lock:
            row = self._reader.execute(query, (response_id, owner, time.time() - self._max_age_s)).fetchone()
        return None if row is None else bytes(row[0])


def _connect(file: Path) -> sqlite3.Connection:
    return sqlite3.connect(file, timeout=_BUSY_TIMEOUT_S, check_same_thread=False)


def _inode_of(file: Path) -> int | None:
    with suppress(OSError):
        return file.stat().st_ino
    return None


def open_store(config: ServerConfig) -> ResponseStore | None:
    """The store that the settings ask for. Raises SettingError."""
    if config.response_store is None:
        return None
    max_bytes, max_age_s = config.response_store_bytes, config.response_store_age
    return ResponseStore(config.response_store, max_bytes=max_bytes, max_age_s=max_age_s)


def check_store(config: ServerConfig) -> None:
    """Open the store that the settings ask for, and leave no file that was not there. Raises SettingError."""
    file = config.response_store
    was_there = file is not None and file.exists()
    store = open_store(config)
    if store is not None and file is not None:
        store.close()
        if not was_there:
            file.unlink(missing_ok=True)
